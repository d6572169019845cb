"""Which backend a call gets, what it says about it, and what the caller is told to change."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fourwave as fw
from fourwave.backends import guard, registry, select
from fourwave.ops.gemm import check, quick
from fourwave.ops.gemm.config import GemmConfig, default_config
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.sm90_config import HopperConfig

SIM = registry.get("sim").unavailable()
FLYDSL = registry.get("flydsl").unavailable()
needs_sim = pytest.mark.skipif(SIM is not None, reason=f"sim: {SIM}")
without_amd_gpu = pytest.mark.skipif(FLYDSL is None, reason="an AMD GPU is here")

A = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
B = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.fixture
def fresh_choices():
    select.clear_cache()
    yield
    select.clear_cache()


# --------------------------------------------------------------------------------------------------------------- choice


@without_amd_gpu
def test_flydsl_without_an_amd_gpu_raises_naming_what_is_missing(monkeypatch):
    monkeypatch.setenv("FOURWAVE_BACKEND", "flydsl")
    with pytest.raises(fw.BackendUnavailable, match=r"AMD GPU.*ROCm build of PyTorch"):
        fw.gemm(A, B)
    told = fw.explain(A, B)
    assert (told.backend, told.requested, told.source) == (None, "flydsl", "FOURWAVE_BACKEND")
    assert isinstance(told.error, fw.BackendUnavailable) and "would raise BackendUnavailable" in str(told)


@without_amd_gpu
def test_auto_runs_native_and_tells_why_flydsl_did_not(monkeypatch, fresh_choices):
    missing = str(registry.get("flydsl").unavailable())  # by now CuTe DSL may have been loaded in this process
    for variable in (None, "", "auto"):
        if variable is not None:
            monkeypatch.setenv("FOURWAVE_BACKEND", variable)
        told = fw.explain(A, B)
        assert told.backend == "native"
        assert told.rejected["flydsl"] == missing
        assert torch.equal(fw.gemm(A, B), fw.gemm(A, B, backend="native"))
    assert missing in str(told) and "native" in str(told)


def test_operands_on_the_cpu_ask_nothing_of_a_gpu(monkeypatch, fresh_choices):
    """On a machine with one: the answer would initialize it."""

    def asked(*_):
        raise AssertionError("asked which GPU there is")

    flydsl, hopper = registry.get("flydsl"), registry.get("hopper")
    missing = flydsl.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(type(hopper), "unavailable", asked)  # an attribute of the object would stay there afterwards
    for name in ("get_device_capability", "get_device_name", "get_device_properties", "current_device", "init"):
        monkeypatch.setattr(torch.cuda, name, asked)
    for build in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, "cuda", "13.0" if build == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "7.0" if build == "hip" else None)
        monkeypatch.setattr(type(flydsl), "unavailable", asked if build == "hip" else lambda *_: missing)
        monkeypatch.setattr(type(hopper), "unavailable", asked if build == "cuda" else lambda *_: "no CUDA")
        select.clear_cache()
        for m in (0, 24):
            told = fw.explain(A[:m], B)
            where = "hopper" if build == "cuda" else "flydsl"
            assert told.backend == "native" and "the operands are on the CPU, not on a" in told.rejected[where]
            assert fw.gemm(A[:m], B).shape == (m, 40)
            fw.quantize(A[:m], "mxfp8_e4m3")
            fw.grouped_gemm(A[:m], B[None], torch.tensor([m]))


def test_auto_never_takes_the_simulator():
    told = fw.explain(A, B)
    assert set(told.rejected) == set(registry.names()) - {told.backend}
    assert SIM is not None or "only when asked for" in told.rejected["sim:gfx950"]


@needs_sim
def test_sim_runs_the_kernel():
    from fourwave import sim

    sim.reset_report()
    for name, arch in (("sim", "gfx950"), ("sim:gfx942", "gfx942")):
        before = len(sim.current_report().launches)
        out = fw.gemm(A, B, backend=name, out_dtype=torch.float32)
        torch.testing.assert_close(out, A.float() @ B.float().T)
        (launch,) = sim.current_report().launches[before:]
        assert launch.arch == arch and launch.workgroups >= 1
        told = fw.explain(A, B, backend=name, out_dtype=torch.float32)
        assert (told.backend, told.arch) == (f"sim:{arch}", arch)
        assert told.config == default_config(told.problem, arch)[0] and told.reasons
        assert str(told.config) in str(told)


def test_argument_beats_use_backend_beats_variable(monkeypatch):
    monkeypatch.setenv("FOURWAVE_BACKEND", "flydsl")
    assert select.requested(None) == ("flydsl", "FOURWAVE_BACKEND")
    with fw.use_backend("sim"):
        assert select.requested(None) == ("sim", "use_backend")
        assert select.requested("native") == ("native", "argument")
        with fw.use_backend("native"):
            assert fw.explain(A, B).backend == "native"
            fw.gemm(A, B)
        assert select.requested(None)[0] == "sim"
    assert select.requested(None)[0] == "flydsl"


def test_use_backend_as_a_plain_call_holds():
    fw.use_backend("native")
    assert fw.explain(A, B).source == "use_backend"
    fw.use_backend(None)
    assert fw.explain(A, B).source == "default"
    with pytest.raises(RuntimeError, match="inside"), fw.use_backend("native"):
        raise RuntimeError("inside")
    assert fw.explain(A, B).source == "default"


def test_one_backend_per_precision(monkeypatch):
    monkeypatch.setenv("FOURWAVE_BACKEND", "bf16=sim, fp32=native")
    assert select.parse("bf16=sim, fp32=native") == {"bf16": "sim", "fp16": "auto", "fp32": "native", "fp8": "auto",
        "mxfp8": "auto", "mxfp4": "auto",
    }  # fmt: skip
    assert select.parse("native,bf16=sim:gfx942") == {
        "bf16": "sim:gfx942",
        "fp16": "native",
        "fp32": "native",
        "fp8": "native",
        "mxfp8": "native",
        "mxfp4": "native",
    }
    assert fw.explain(A.float(), B.float()).backend == "native"
    bf16 = fw.explain(A, B)
    assert bf16.backend == (None if SIM else "sim:gfx950")
    with fw.use_backend("bf16=native"):
        assert fw.explain(A, B).backend == "native"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cublas", r"'cublas'.*auto, flydsl, hopper, native, sim:gfx942, sim:gfx950, sim"),
        ("bf16=cublas", "'cublas'.*auto, flydsl, hopper, native"),
        ("sim:gfx90a", "'sim:gfx90a'.*sim:gfx942, sim:gfx950"),
        ("fp4=sim", "precision 'fp4'.*bf16, fp16, fp32, fp8"),
        ("native,sim", "two backends"),
        ("bf16=sim,bf16=native", "twice"),
        ("bf16=", "backend ''"),
        ("native,", "backend ''"),
    ],
)
def test_unknown_names_are_errors_that_list_the_known(monkeypatch, spec, message):
    with pytest.raises(ValueError, match=message):
        fw.gemm(A, B, backend=spec)
    with pytest.raises(ValueError, match=message):
        fw.use_backend(spec)
    monkeypatch.setenv("FOURWAVE_BACKEND", spec)
    with pytest.raises(ValueError, match=message):
        fw.gemm(A, B)
    with pytest.raises(ValueError, match="backends are"):
        registry.get("nobody")


@needs_sim
def test_a_named_backend_that_cannot_raises():
    foreign = [each.to(torch.float8_e4m3fnuz) for each in (A, B)]  # codes of gfx942
    with pytest.raises(NotImplementedError, match=r"'sim'.*float8_e4m3fnuz"):
        fw.gemm(*foreign, backend="sim")
    told = fw.explain(*foreign, backend="sim")
    assert told.backend is None and isinstance(told.error, NotImplementedError)
    assert fw.explain(*foreign).rejected["sim:gfx950"]


def test_a_config_is_not_dropped():
    config = default_config(GemmProblem(24, 40, 64, "TN", torch.bfloat16, torch.bfloat16, torch.bfloat16), "gfx950")[0]
    with pytest.raises(NotImplementedError, match="takes no config"):
        fw.gemm(A, B, config=config, backend="native")
    if FLYDSL:
        with pytest.raises(NotImplementedError, match=r"no backend can.*flydsl: .*native: .*config"):
            fw.gemm(A, B, config=config)
    with pytest.raises(NotImplementedError, match="config"):
        fw.gemm(A.clone().requires_grad_(), B, config=config)


@needs_sim
@pytest.mark.parametrize("name", ["tile_m", "tile_n", "tile_k", "num_stages", "waves_m", "waves_n", "group_m"])
def test_a_config_of_zeros_is_refused_with_the_reason(name):
    values: tuple[Any, ...] = (0, -16, 16.0, "16")
    for value in values:
        config = replace(GemmConfig(), **{name: value})
        with pytest.raises(NotImplementedError, match=f"{name}={value!r}: an int of at least 1"):
            fw.gemm(A, B, config=config, backend="sim")
        assert f"{name}={value!r}" in str(fw.explain(A, B, config=config, backend="sim").error)


@pytest.mark.parametrize("call", [fw.gemm, fw.explain])
def test_a_config_or_backend_of_a_wrong_type_is_an_error(call):
    for config in ({"tile_m": 64}, (256, 256), "256x256", 7, GemmConfig):
        with pytest.raises(ValueError, match=r"config is .*GemmConfig"):
            call(A, B, config=config)
    for backend in (7, b"sim", registry.get("sim"), ["sim"]):
        with pytest.raises(ValueError, match=r"backend is .*native"):
            call(A, B, backend=backend)


@needs_sim
def test_a_config_of_another_backend_is_refused():
    with pytest.raises(NotImplementedError, match="config is a HopperConfig"):
        fw.gemm(A, B, config=HopperConfig(), backend="sim")  # type: ignore[arg-type]


@needs_sim
def test_sim_takes_a_config():
    from dataclasses import replace

    problem = GemmProblem(24, 40, 64, "TN", torch.bfloat16, torch.bfloat16, torch.bfloat16)
    config = default_config(problem, "gfx950")[0]
    assert torch.equal(fw.gemm(A, B, backend="sim", config=config), fw.gemm(A, B, backend="sim"))
    told = fw.explain(A, B, backend="sim", config=config)
    assert told.config is config and told.reasons == ["config given by the caller"]
    with pytest.raises(NotImplementedError, match="tile"):
        fw.gemm(A, B, backend="sim", config=replace(config, tile_m=24))


def test_a_usable_flydsl_comes_first(monkeypatch, fresh_choices):
    """What automatic does where FlyDSL can run, told by a stand-in for its two answers."""
    flydsl = registry.get("flydsl")
    monkeypatch.setattr(type(flydsl), "unavailable", lambda self, arch=None: None)
    monkeypatch.setattr(type(flydsl), "why_unsupported", lambda self, problem, config: None)
    problem = GemmProblem(24, 40, 64, "TN", torch.bfloat16, torch.bfloat16, torch.bfloat16)
    assert select.select("auto", problem, None).backend is flydsl
    monkeypatch.setattr(type(flydsl), "why_unsupported", lambda self, problem, config: "not this one")
    select.clear_cache()
    chosen = select.select("auto", problem, None)
    assert chosen.backend.name == "native" and chosen.rejected[0] == ("flydsl", "not this one")
    assert [name for name, _ in chosen.rejected] == ["flydsl", "hopper"]
    with pytest.raises(NotImplementedError, match="not this one"):
        select.select("flydsl", problem, None)


def test_dispatch_log(caplog, told):
    with caplog.at_level(logging.DEBUG, logger="fourwave.dispatch"):
        fw.gemm(A, B.T.contiguous().T)
    (record,) = told()
    message = record.getMessage()
    assert record.name == "fourwave.dispatch" and record.levelno == logging.DEBUG
    assert "24x40x64 TN bf16" in message and fw.explain(A, B).backend in message and "b copied" in message
    assert FLYDSL is None or FLYDSL in message
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="fourwave.dispatch"):
        fw.gemm(A, B)
    assert not told()


# -------------------------------------------------------------------------------------------------------------- explain


def test_explain_runs_nothing_and_says_what_is_copied():
    out = torch.full((40, 24), float("nan"), dtype=torch.bfloat16).mT
    bias = torch.zeros(80)[::2]
    told = fw.explain(A[:, ::2], B[:, :32], out=out, bias=bias, backend="native")
    assert out.isnan().all()
    assert [note.split()[:2] for note in told.notes] == [["a", "copied:"], ["bias", "copied:"], ["out", "copied:"]]
    assert (told.problem.M, told.problem.N, told.problem.K, told.problem.layout) == (24, 40, 32, "TN")
    assert fw.explain(A[:, :32], B[:, 1:33]).notes == []
    assert fw.explain(A, B.T, trans_b=False).problem.layout == "NN"
    assert fw.explain(A.T, B.T, trans_a=True, trans_b=False).problem.layout == "NT"
    with pytest.raises(ValueError, match="must be equal"):
        fw.explain(A, B[:, :8])


@needs_sim
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_explain_tells_the_copies_that_the_kernels_need(arch, caplog, told):
    backend = f"sim:{arch}"
    flat = torch.zeros(4096, dtype=torch.bfloat16)
    out = torch.zeros(24, 40, dtype=torch.bfloat16)
    bias = torch.zeros(48)[1:41]
    cases: list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any], list[str]]] = [
        ((A, B), {}, []),
        ((flat[1 : 1 + 24 * 64].view(24, 64), B), {}, ["a copied: base not 16-byte aligned"]),
        ((A, flat[: 40 * 68].view(40, 68)[:, :64]), {}, ["b copied: row stride not 16-byte aligned"]),
        (
            (flat[: 24 * 72].view(24, 72)[:, :60], flat[: 40 * 72].view(40, 72)[:, :60]),
            {},
            [f"{name} copied: row length 60 is not a multiple of 8" for name in "ab"],
        ),
        ((A, B), {"bias": bias, "out": out}, ["bias copied: not 16-byte aligned"]),
    ]
    for operands, extra, notes in cases:
        explained = fw.explain(*operands, backend=backend, **extra)
        assert explained.notes == notes
        assert all(note in str(explained) for note in notes)
        assert fw.explain(*operands, backend="native", **extra).notes == []
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="fourwave.dispatch"):
            fw.gemm(*operands, backend=backend, **extra)
        text = "\n".join(record.getMessage() for record in told())
        assert [note for note in notes if note not in text] == []
        assert text.count("copied") == len(notes)


def test_what_backends_are_handed():
    """2-D, inner stride 1, row stride at least the row's length, equal to the operand; a view wherever one can be."""
    t = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    views = [
        t,
        t[:, :30],
        t[3:, 5:],
        t.view(8, 8, 64),
        t[:1, :5],
        t[:, :1],
        t[:, 7:8],
        t[5:6, 5:6],
        t.view(8, 8, 64)[:, :, 3:],
    ]
    views += [t.as_strided((1, 5), (1, 1)), t.as_strided((5, 1), (64, 3)), t.as_strided((1, 5), (0, 1))]
    copies = [t.mT, t[:, ::2], t[:1].expand(5, 64), t[:, :1].expand(64, 5), t.view(8, 8, 64).transpose(0, 1)]
    copies += [t.as_strided((5, 8), (4, 1)), t.as_strided((5, 1), (0, 1)), torch._neg_view(t), torch._neg_view(t[0])]
    for operands, copied in ((views, False), (copies, True)):
        for x in operands:
            rows = x.numel() // x.shape[-1]
            notes: list[str] = []
            matrix = check.matrix(x, rows, "a", notes)
            assert matrix.shape == (rows, x.shape[-1]) and not matrix.is_neg()
            assert torch.equal(matrix, x.reshape(matrix.shape))
            assert matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
            assert len(notes) == copied, (x.shape, x.stride(), notes)
            assert (matrix.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()) == copied


def test_explain_of_an_empty_problem():
    told = fw.explain(A[:0], B)
    assert told.problem.is_empty and told.kernel == "nothing to launch"


# --------------------------------------------------------------------------------------------------------------- errors


def test_argument_errors():
    def fails(match, *args, error=ValueError, **kwargs):
        with pytest.raises(error, match=match):
            fw.gemm(*args, **kwargs)

    fails("swap the operands", A, B, trans_a=True)
    fails(r"bfloat16 and b is torch.float32; both must have one dtype, float32, bfloat16 or float16", A, B.float())
    fails("float64", A.double(), B.double())
    fails("24, 64.*40, 63.*64 and 63", A, B[:, :63])
    fails("64 and 40", A, B, trans_b=False)
    fails("24 and 40", A, B, trans_a=True, trans_b=False)
    fails("b is .2, 40, 64.; without trans_a it is a matrix, .N, K.", A, B.expand(2, 40, 64))
    fails("at least one dimension", A[0, 0], B)
    fails("out_dtype is torch.float64", A, B, out_dtype=torch.float64)
    fails("activation 'tanh'.*relu, gelu, gelu_tanh, silu", A, B, activation="tanh")
    fails("bias is .24,.; it must be .N. = .40.", A, B, bias=torch.zeros(24))
    fails("bias is torch.int32", A, B, bias=torch.zeros(40, dtype=torch.int32))
    fails("no out was given", A, B, accumulate=True)
    fails("no out was given", A.clone().requires_grad_(), B, accumulate=True)
    fails("out is .24, 41.; .* give .24, 40.", A, B, out=torch.empty(24, 41))
    fails("out_dtype is torch.bfloat16 and out is torch.float32", A, B, out=torch.empty(24, 40), out_dtype=A.dtype)
    fails("sparse", A.to_sparse(), B)
    fails("one CPU or GPU", A, B.to("meta"))
    fails("bias is on meta", A, B, bias=torch.zeros(40, device="meta"))
    fails("out is on meta", A, B, out=torch.zeros(24, 40, device="meta"))


def test_out_that_shares_memory_is_an_error():
    buffer = torch.zeros(64, 256, dtype=torch.bfloat16)
    a, w = buffer[:, :64], torch.zeros(64, 64, dtype=torch.bfloat16)
    for out in (a, buffer[:, 32:96], buffer[:64, :64].mT, buffer.view(-1)[63 : 63 + 64 * 64].view(64, 64)):
        with pytest.raises(ValueError, match="out shares memory with a"):
            fw.gemm(a, w, out=out)
    with pytest.raises(ValueError, match="out shares memory with b"):
        fw.gemm(w, a, out=buffer[:, 63:127])
    with pytest.raises(ValueError, match="out shares memory with bias"):
        fw.gemm(w.clone(), w, bias=buffer[3, :64], out=a)
    buffer[:, :64] = 1
    w.fill_(1)
    for start in (64, 65, 192):  # beside a in the same rows: no element is shared
        assert (fw.gemm(a, w, out=buffer[:, start : start + 64]) == 64).all()
        assert (a == 1).all()
    with pytest.raises(ValueError, match="two elements share one place"):
        fw.gemm(a, w, out=torch.zeros(64, dtype=torch.bfloat16).expand(64, 64))
    with pytest.raises(ValueError, match="two elements share one place"):
        fw.gemm(a, w, out=torch.zeros(4096, dtype=torch.bfloat16).as_strided((64, 64), (3, 1)))


def test_out_with_gradients_is_an_error():
    a = A.clone().requires_grad_()
    out = torch.empty(24, 40, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out= was given and an argument requires grad"):
        fw.gemm(a, B, out=out)
    with pytest.raises(ValueError, match="requires grad"):
        fw.gemm(A, B, out=out.clone().requires_grad_())
    with torch.no_grad():
        assert fw.gemm(a, B, out=out) is out
    assert not out.requires_grad


# ------------------------------------------------------------------------------------------------- operator and autograd


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_gradients_match_autograd_of_the_definition(layout, activation):
    from fourwave.ops.gemm.reference import gemm_reference

    generator = torch.Generator().manual_seed(0)
    trans_a, trans_b = layout == "NT", layout == "TN"
    a = torch.randn((2, 3, 5) if trans_a else (2, 4, 6), generator=generator, requires_grad=True)
    b = torch.randn((6, 7) if trans_a else (7, 6) if trans_b else (6, 7), generator=generator, requires_grad=True)
    bias = torch.randn(7, generator=generator, requires_grad=True)
    options = {"trans_a": trans_a, "trans_b": trans_b, "bias": bias, "activation": activation, "alpha": 0.7}
    out = fw.gemm(a, b, backend="native", **options)
    flat = a.reshape(-1, a.shape[-1])
    exact = gemm_reference(flat, b, **options).reshape(out.shape)
    torch.testing.assert_close(out, exact.float())
    dout = torch.randn(out.shape, generator=generator, requires_grad=True)
    got = torch.autograd.grad(out, (a, b, bias), dout, create_graph=True)
    expected = torch.autograd.grad(exact, (a, b, bias), dout.double(), create_graph=True)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e.float(), rtol=1e-5, atol=1e-5)
    # Once more, through the backward pass.
    again = torch.autograd.grad([g.sum() for g in got], (a, b, dout))
    expected = torch.autograd.grad([e.sum() for e in expected], (a, b, dout))
    for g, e in zip(again, expected, strict=True):
        torch.testing.assert_close(g, e.float(), rtol=1e-4, atol=1e-4)


def test_backward_keeps_the_backend_of_the_forward(monkeypatch):
    asked = []
    real = select.select

    def spy(spec, problem, config):
        asked.append((spec, problem.layout))
        return real(spec, problem, config)

    monkeypatch.setattr(select, "select", spy)
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    with fw.use_backend("bf16=native"):
        out = fw.gemm(a, b)
    out.sum().backward()
    assert asked == [("bf16=native", "TN"), ("bf16=native", "NN"), ("bf16=native", "NT")]


def test_only_asked_gradients_are_computed(monkeypatch):
    layouts = []
    real = select.select

    def spy(spec, problem, config):
        layouts.append(problem.layout)
        return real(spec, problem, config)

    select.clear_cache()
    monkeypatch.setattr(select, "select", spy)
    fw.gemm(A, B.clone().requires_grad_()).sum().backward()
    assert layouts == ["TN", "NT"]


def test_opcheck():
    a, b, bias = torch.randn(2, 4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True), torch.randn(5)
    torch.library.opcheck(torch.ops.fourwave.gemm.default, (a, b, bias), {"activation": "silu", "alpha": 0.5})
    torch.library.opcheck(torch.ops.fourwave.gemm.default, (a, b), {"out_dtype": torch.bfloat16})
    args = (A, B, torch.zeros(24, 40), torch.zeros(40), False, True, "relu", 2.0, True)
    # The last argument is given as fw.gemm gives it: PyTorch 2.11 would miss defaults at the end.
    torch.library.opcheck(torch.ops.fourwave.gemm_out.default, args, {"b_preshuffled": False})


def test_compile_sees_one_operator():
    def model(a, b, bias, out):
        y = fw.gemm(a, b, bias=bias, activation="relu", out_dtype=torch.float32)
        fw.gemm(a, b, out=out, accumulate=True)
        return y * 2 + out

    seen: list = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    bias, out = torch.randn(40), torch.randn(24, 40)
    expected = model(A, B, bias, out.clone())
    torch.testing.assert_close(compiled(A, B, bias, out.clone()), expected)
    assert torch.ops.fourwave.gemm.default in seen or torch.ops.fourwave.gemm in seen
    assert torch.ops.fourwave.gemm_out.default in seen or torch.ops.fourwave.gemm_out in seen


def test_compile_with_gradients():
    weight, bias = B.float().requires_grad_(), torch.randn(40, requires_grad=True)

    def loss(x):
        return fw.gemm(x, weight, bias=bias, activation="gelu").square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    x = A.float().requires_grad_()
    expected = torch.autograd.grad(loss(x), (x, weight, bias))
    got = torch.autograd.grad(compiled(x), (x, weight, bias))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_functional_transforms_and_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda w: fw.gemm(A.float(), w).sum())(B.float())
    with FakeTensorMode():
        fake = fw.gemm(torch.empty(2, 3, 8, dtype=torch.bfloat16), torch.empty(5, 8, dtype=torch.bfloat16))
        assert fake.shape == (2, 3, 5) and fake.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="must be equal"):
            fw.gemm(torch.empty(2, 9), torch.empty(5, 8))


# ------------------------------------------------------------------------------------------------------ import and guard


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_no_dsl_and_is_quick():
    """In calls, 57 000 of which took 0.2 s: a time would be the machine's, and of what else runs on it."""
    out = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "calls = 0\n"
        "def count(frame, event, argument):\n"
        "    global calls\n"
        "    calls += event in ('call', 'c_call')\n"
        "sys.setprofile(count)\n"
        "import fourwave\n"
        "sys.setprofile(None)\n"
        "print(calls)\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))\n"
        "print(*[m for m in sys.modules if m.startswith('fourwave.')])\n"
    )
    calls, added, ours = out.splitlines()
    assert 10_000 < int(calls) < 200_000
    heavy = {"flydsl", "cutlass", "rich", "typer", "click", "transformers", "ml_dtypes"}
    assert heavy.isdisjoint(added.split())
    for part in ("sim", "tune", "testing", "perf", "cli", "demo"):
        assert f"fourwave.{part}" not in ours.split()


def test_native_call_loads_no_dsl():
    out = run_python(
        "import sys, torch, fourwave as fw\n"
        "fw.gemm(torch.ones(2, 3), torch.ones(4, 3))\n"
        "print(*[m for m in ('flydsl', 'cutlass') if m in sys.modules])\n"
    )
    assert out.strip() == ""


def test_guard_refuses_the_second_dsl(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass._mlir", type(sys)("cutlass._mlir"))
    with pytest.raises(fw.BackendUnavailable, match=r"CuTe DSL is loaded.*another process"):
        guard.import_flydsl()
    assert "CuTe DSL is loaded" in (registry.get("flydsl").unavailable() or "")
    if SIM is None:
        assert "CuTe DSL is loaded" in (registry.get("sim").unavailable() or "")
    monkeypatch.delitem(sys.modules, "cutlass._mlir")
    monkeypatch.setitem(sys.modules, "flydsl.compiler", type(sys)("flydsl.compiler"))
    with pytest.raises(fw.BackendUnavailable, match=r"FlyDSL is loaded.*another process"):
        guard.import_cutlass()


def test_guard_names_what_is_not_installed(monkeypatch):
    import importlib.util

    for name in [n for n in sys.modules if n.split(".")[0] in ("flydsl", "cutlass")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fw.BackendUnavailable, match=r"flydsl is not installed: pip install 'fourwave\[amd\]'"):
        guard.import_flydsl()
    with pytest.raises(fw.BackendUnavailable, match=r"fourwave\[hopper\]"):
        guard.import_cutlass()


# ------------------------------------------------------------------------------------------------------------- warm path


def test_warm_call_parses_and_chooses_nothing_again(monkeypatch):
    a, b = torch.ones(2, 8), torch.ones(3, 8)
    monkeypatch.setenv("FOURWAVE_BACKEND", "fp32=native")
    fw.gemm(a, b)
    parses, choices, problems = (f.cache_info() for f in (select.parse, select.select, check._problem))
    for _ in range(3):
        fw.gemm(a, b)
    assert select.parse.cache_info().misses == parses.misses
    assert select.select.cache_info().misses == choices.misses
    assert check._problem.cache_info().misses == problems.misses


def test_a_second_call_of_a_kind_is_checked_like_the_first():
    """What a kind of call needs is kept; what depends on these very tensors is looked at every time."""
    select.clear_cache()  # a full one would be emptied somewhere in between
    x = torch.randn(6, 8)
    expected = x @ x.mT
    for _ in range(2):
        torch.testing.assert_close(fw.gemm(x, x), expected)
    torch.testing.assert_close(fw.gemm(torch._neg_view(x), x), -expected)
    torch.testing.assert_close(fw.gemm(x, torch._neg_view(x)), -expected)
    assert fw.gemm(x.clone().requires_grad_(), x).requires_grad
    assert fw.gemm(x, torch.nn.Parameter(x)).requires_grad
    assert not fw.gemm(x, torch.nn.Parameter(x, requires_grad=False)).requires_grad
    wide = torch.randn(6, 16)
    torch.testing.assert_close(fw.gemm(wide[:, :8], x), wide[:, :8] @ x.mT)
    out = torch.empty(6, 6)
    for _ in range(2):
        assert fw.gemm(x, x, out=out) is out
        torch.testing.assert_close(out, expected)
    buffer = torch.randn(200)
    a, shared = buffer[:48].view(6, 8), buffer[40:76].view(6, 6)
    for _ in range(2):
        with pytest.raises(ValueError, match="out shares memory with a"):
            fw.gemm(a, x, out=shared)
    columns = torch.randn(6, 24)
    left, right = columns[:, :8], columns[:, 8:14]
    for _ in range(2):
        torch.testing.assert_close(fw.gemm(left, x, out=right), left @ x.mT)
    with pytest.raises(ValueError, match="out= was given and an argument requires grad"):
        fw.gemm(x.clone().requires_grad_(), x, out=out)
    with pytest.raises(ValueError, match="activation"):
        fw.gemm(x, x, activation=["relu"])  # type: ignore[arg-type]
    for alpha in (1.0, 2.0, 0.5):
        torch.testing.assert_close(fw.gemm(x, x, alpha=alpha), alpha * expected)
    tokens, vector, given = torch.randn(2, 3, 8), torch.randn(8), torch.empty(2, 3, 6)
    for _ in range(2):
        torch.testing.assert_close(fw.gemm(tokens, x), tokens @ x.mT)
        torch.testing.assert_close(fw.gemm(vector, x), x @ vector)
        assert fw.gemm(tokens, x, out=given) is given
        torch.testing.assert_close(given, tokens @ x.mT)
        wgrad = fw.gemm(given, tokens, trans_a=True, trans_b=False)
        torch.testing.assert_close(wgrad, given.flatten(0, 1).mT @ tokens.flatten(0, 1))
    assert any(entry.plan.a_view is not None for entry in quick._entries.values())
    with fw.use_backend("sim"), pytest.raises((fw.BackendUnavailable, NotImplementedError, ValueError)):
        fw.gemm(x.to(torch.int32), x.to(torch.int32))


@pytest.mark.parametrize("options", [{}, {"out_format": "fp8_e4m3", "out_scale": torch.ones(())}])
def test_a_flag_that_equals_a_bool_is_refused_by_a_second_call_too(options):
    """1.0 and True are one key of a dict."""
    x, call = torch.randn(8, 8), options | {"trans_a": False, "trans_b": True}
    flags = ("trans_a", "trans_b", "accumulate", "batch_invariant", "fast_accum")
    for q in (x, fw.quantize(x, "fp8_row")):
        for _ in range(3):
            fw.gemm(q, q, **call)
        for name in flags:
            for value in (float(name == "trans_b"), np.bool_(name == "trans_b")):
                with pytest.raises(ValueError, match=f"{name} is .*; it must be True or False"):
                    fw.gemm(q, q, **call | {name: value})


def test_accumulate_without_out_is_refused_as_an_operator_too():
    """There is nothing to add to but what new memory holds."""
    x = torch.randn(8, 8)
    for q in (x, fw.quantize(x, "fp8_row")):
        for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
            with mode, pytest.raises(ValueError, match="accumulate=True adds to `out`, and no out was given"):
                fw.gemm(q, q, accumulate=True)


# --------------------------------------------------------------------------------------------------- what is missing


@pytest.mark.parametrize(
    ("version", "wrong"),
    [("0.5.0", False), ("0.5.9", False), ("0.6.0", True), ("0.4.9", True), ("1.0", True), ("0.2.4", True)],
)
def test_the_range_of_flydsl_is_that_of_the_extra(monkeypatch, version, wrong):
    import importlib.metadata
    import importlib.util

    from fourwave.backends import flydsl

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    why = flydsl.flydsl_missing.__wrapped__()
    assert (why is not None) == wrong
    if why:
        assert f"flydsl {version} is installed and >=0.5,<0.6 is needed" in why
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '"flydsl>=0.5,<0.6"' in pyproject
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in (flydsl.flydsl_missing.__wrapped__() or "")


def test_devices_that_have_no_kernel_are_named(monkeypatch):
    from fourwave.backends import flydsl

    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in (flydsl._device_missing.__wrapped__() or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    archs = {0: "gfx90a:sramecc+:xnack-", 1: "gfx1100"}
    properties = type("Properties", (), {})
    for name, missing in (("gfx1100", True), ("gfx942:sramecc+:xnack-", False), ("gfx1250", False)):
        archs[1] = name

        def get(index):
            found = properties()
            found.gcnArchName = archs[index]
            return found

        monkeypatch.setattr(torch.cuda, "get_device_properties", get)
        flydsl.device_arch.cache_clear()
        why = flydsl._device_missing.__wrapped__()
        assert (why is not None) == missing
        if why:
            assert "gfx90a, gfx1100" in why and "gfx942, gfx950 or gfx1250" in why
    flydsl.device_arch.cache_clear()
