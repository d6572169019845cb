"""Transformer Engine's paths of modules, for scripts in which `fourwave.te` takes the place of `transformer_engine`:

    import fourwave.te.pytorch as te
    from fourwave.te.common.recipe import Format
    from fourwave.te.pytorch.quantization import FP8GlobalStateManager

They are other names of the modules here. A path, or a name of a `from ... import`, that is not here raises ImportError which says
what to use instead.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from fourwave.te import distributed, gemm, modules, quantization, recipe
from fourwave.te.missing import getattr_of, instead_of

_MODULES = (
    "base",
    "fp8_padding",
    "grouped_linear",
    "layernorm",
    "layernorm_linear",
    "layernorm_mlp",
    "linear",
    "rmsnorm",
)


def register(te: ModuleType) -> ModuleType:
    """Give the modules their other names. te: the package. Returns its `common`."""
    common = ModuleType(f"{te.__name__}.common", "transformer_engine.common: recipes.")
    common.recipe = recipe  # type: ignore[attr-defined]
    paths = {
        "common": common, "common.recipe": recipe, "pytorch": te, "pytorch.cpp_extensions": gemm, "pytorch.cpp_extensions.gemm": gemm,
        "pytorch.distributed": distributed, "pytorch.fp8": quantization, "pytorch.module": modules,
        **{f"pytorch.module.{name}": modules for name in _MODULES},
        "pytorch.quantization": quantization,
    }  # fmt: skip
    for path, module in paths.items():
        sys.modules[f"{te.__name__}.{path}"] = module
        short = f"{te.__name__}.{path.removeprefix('pytorch.')}"  # fourwave.te is transformer_engine.pytorch, too
        sys.modules.setdefault(short, module)
    for name in _MODULES:  # te.pytorch.module.base.TransformerEngineBaseModule
        setattr(modules, name, modules)
    gemm.gemm = gemm  # type: ignore[attr-defined]
    for module in (distributed, gemm, modules, quantization, recipe):
        module.__getattr__ = getattr_of(module.__name__)  # type: ignore[method-assign]
        module.__path__ = []  # of a package, whose `from package import name` asks the finder for names that it lacks
    sys.meta_path.append(_Told())
    return common


class _Told:
    """Asked last, for what no other finder has found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        package, _, last = name.rpartition(".")
        if package == "fourwave.te" or package.startswith("fourwave.te."):
            text = instead_of(last)
            if text is not None:
                raise ImportError(text, name=name)
