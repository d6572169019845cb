"""fourwave.te: what scripts pass and ask for besides: orders of arguments, no-ops of one rank, forward's arguments, kinds of recipes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fourwave.te as te
from fourwave import recipes as R
from fourwave.te import recipe
from fourwave.te.recipe import Format, MMParams

BF16 = torch.bfloat16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ONE_RANK: dict[str, Any] = {"sequence_parallel": True, "tp_size": 1, "get_rng_state_tracker": lambda: None}
OVERLAP: dict[str, Any] = {
    "ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True,
    "symmetric_ar_type": "multimem_all_reduce",
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "arguments", "plain"),
    [
        (te.Linear, {"parallel_mode": "column", "ub_name": "qkv", "save_original_input": True, **OVERLAP}, (32, 64)),
        (te.Linear, {"parallel_mode": "row", "rng_tracker_name": "model", **OVERLAP}, (32, 64)),
        (te.LayerNormLinear, {"parallel_mode": "column", "return_layernorm_output_gathered": True, **OVERLAP}, (32, 64)),
        (te.LayerNormMLP, {"set_parallel_mode": True, "micro_batch_size": 2, **OVERLAP}, (32, 64)),
        (te.GroupedLinear, {"parallel_mode": "row", "use_grouped_tensor": False, "name": "fc1"}, (1, 32, 64)),
    ],
    ids=["column", "row", "layernorm", "mlp", "grouped"],
)  # fmt: skip
def test_with_one_rank_parallelism_changes_nothing(
    make: Any, arguments: dict[str, Any], plain: tuple[int, ...]
) -> None:
    results = []
    for given in ({}, {**ONE_RANK, **arguments}):
        torch.manual_seed(0)
        module = make(*plain, device="cpu", **given)
        assert module.tp_size == 1 and module.sequence_parallel is False
        results.append(module(randn(5, 32), *[[5]] * (make is te.GroupedLinear)))
    assert torch.equal(*results)
    module.set_tensor_parallel_group(None)
    with pytest.raises(NotImplementedError, match="4 tensor-parallel ranks"):
        make(*plain, device="cpu", tp_size=4, **arguments)
    if "parallel_mode" in arguments:
        with pytest.raises(ValueError, match="'column' or 'row'"):
            make(*plain, device="cpu", parallel_mode="columns")


def test_the_group_says_how_many_ranks() -> None:
    """tp_size is not read where a group is given."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = te.Linear(8, 8, tp_group=dist.group.WORLD, tp_size=7, device="cpu")
        assert module.tp_group is dist.group.WORLD and module.tp_size == 1
        module.set_tensor_parallel_group(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_forward_takes_inp_and_refuses_quantized_ends() -> None:
    x = randn(4, 32)
    modules: list[Any] = [te.Linear(32, 32), te.LayerNormLinear(32, 32), te.LayerNormMLP(32, 32)]
    for module in modules:
        assert torch.equal(module(inp=x, is_first_microbatch=True), module(x))
    for module in modules[:2]:
        assert torch.equal(module(x, None, False, False), module(x))
        for name in ("fp8_output", "fp8_grad"):
            with pytest.raises(NotImplementedError, match=name):
                module(x, **{name: True})
    grouped = te.GroupedLinear(2, 32, 32)
    assert torch.equal(grouped(inp=x, m_splits=[1, 3], out=None, dgrad_out=None), grouped(x, [1, 3]))
    for name in ("out", "dgrad_out"):
        with pytest.raises(NotImplementedError, match=name):
            grouped(x, [1, 3], **{name: x})


@pytest.mark.parametrize("make", [te.Linear, te.LayerNormLinear, te.LayerNormMLP], ids=lambda c: c.__name__)
def test_the_returned_bias_has_the_activations_type(make: Any) -> None:
    module, x = make(32, 32, return_bias=True), randn(4, 32, dtype=BF16)
    bias = module.fc2_bias if make is te.LayerNormMLP else module.bias
    bias.data.copy_(randn(32))
    y, returned = module(x)
    assert y.dtype == returned.dtype == BF16 and torch.equal(returned, bias.to(BF16))
    with torch.autocast("cpu", torch.float16):
        assert module(x.float())[1].dtype == torch.float16
    (y + returned).float().sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((32,), 4.0))
    y, returned = make(32, 32, return_bias=True, bias=False)(x)
    assert returned.shape == (0,) and returned.dtype == BF16
    if make is not te.Linear:
        y, returned, normal = make(32, 32, return_bias=True, return_layernorm_output=True)(x)
        assert returned.shape == (32,) and normal.shape == x.shape


def test_delayed_wgrad_and_its_hooks() -> None:
    module, x = te.Linear(32, 32, delay_wgrad_compute=True), randn(4, 32)
    assert module.need_backward_dw() and not te.Linear(4, 4).need_backward_dw()
    assert module.weight.skip_backward_post_hook  # type: ignore[attr-defined]
    seen: list[Any] = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.weight.grad))
    module(x).sum().backward()
    assert module.weight.grad is None and not seen
    module.backward_dw()
    assert len(seen) == 1 and seen[0] is module.weight.grad
    torch.testing.assert_close(seen[0], torch.ones(4, 32).mT @ x)
    with pytest.raises(RuntimeError, match="no backward pass waits"):
        module.backward_dw()
    assert len(seen) == 1
    module.weight.requires_grad_(False)
    module.backward_dw()
    assert len(seen) == 2


@pytest.mark.parametrize("frozen", [None, "fc1_weight", "fc2_weight"])
def test_delayed_wgrad_is_that_of_the_earliest_backward_pass(frozen: str | None) -> None:
    """Schedules put a call of backward_dw after each backward pass of another microbatch."""
    torch.manual_seed(0)
    module, plain = te.LayerNormMLP(32, 48, delay_wgrad_compute=True), te.LayerNormMLP(32, 48)
    plain.load_state_dict(module.state_dict())
    if frozen is not None:
        getattr(module, frozen).requires_grad_(False)
    names = [name for name in ("fc1_weight", "fc2_weight") if name != frozen]
    outputs = [module(randn(4, 32, seed=seed)) for seed in range(3)]
    for seed in (2, 0, 1):  # not the order of the forward passes
        outputs[seed].square().sum().backward()
    for seed in (2, 0, 1):
        module.backward_dw()
        plain(randn(4, 32, seed=seed)).square().sum().backward()
        for name in names:
            torch.testing.assert_close(getattr(module, name).grad, getattr(plain, name).grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="no backward pass waits"):
        module.backward_dw()


@pytest.mark.parametrize(
    "make",
    [lambda d: te.Linear(8, 8, device=d), lambda d: te.LayerNormLinear(8, 8, device=d), lambda d: te.LayerNormMLP(8, 8, device=d),
     lambda d: te.GroupedLinear(2, 8, 8, device=d), lambda d: te.LayerNorm(8, device=d), lambda d: te.RMSNorm(8, device=d)],
    ids=["linear", "layernorm_linear", "mlp", "grouped", "layernorm", "rmsnorm"],
)  # fmt: skip
def test_reset_parameters_gives_memory_to_meta_modules(make: Any) -> None:
    module = make("meta")
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters(defer_init=True)
    assert all(p.is_meta for p in module.parameters())
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    right = make("cpu")
    for (name, p), q in zip(module.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_norms_take_transformer_engines_arguments() -> None:
    x = randn(4, 32)
    for make, right in ((te.LayerNorm, F.layer_norm(x, (32,), eps=1e-3)), (te.RMSNorm, F.rms_norm(x, (32,), eps=1e-3))):
        with pytest.warns(DeprecationWarning, match="normalized_shape"):
            old: Any = make(None, 1e-3, True, torch.float32, False, 32, device="cpu")
        torch.testing.assert_close(old(x), right, rtol=1e-5, atol=1e-5)
        assert old.sequence_parallel and all(p.sequence_parallel for p in old.parameters())
        new: Any = make(32, eps=1e-3, sm_margin={"forward": 2}, dtype=BF16, device="cpu")
        assert new.weight.dtype == BF16 and new.sequence_parallel is None
        assert not hasattr(new.weight, "sequence_parallel")
        torch.testing.assert_close(new(input=x), right, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="hidden_size"):
            make()
        with pytest.raises(ValueError, match="params_dtype"):
            make(32, params_dtype=BF16, dtype=BF16)
        with pytest.raises(ValueError, match=r"input is torch\.float64"):
            new(x.double())
        with pytest.raises(ValueError, match=r"last dimensions must be \(32,\)"):
            new(randn(4, 16))
    y = randn(3, 4, 32)
    wide: Any = te.LayerNorm((4, 32), device="cpu")
    wide.weight.data.copy_(randn(4, 32, seed=1))
    torch.testing.assert_close(wide(y), F.layer_norm(y, (4, 32), wide.weight, wide.bias), rtol=1e-5, atol=1e-5)


def test_checkpoints_of_norms_load_strictly() -> None:
    model = torch.nn.Sequential(te.LayerNorm(8), te.RMSNorm(8))
    state = {**model.state_dict(), "0._extra_state": torch.empty(0), "1._extra_state": None}
    state["0.weight"] = randn(8)
    model.load_state_dict(state)
    assert torch.equal(model.get_parameter("0.weight"), state["0.weight"])


def test_splits_are_any_integers() -> None:
    grouped, x = te.GroupedLinear(3, 32, 32), randn(8, 32)
    right = grouped(x, [3, 0, 5])
    for splits in (
        np.array([3, 0, 5]),
        list(np.array([3, 0, 5], np.int32)),
        (3, 0, 5),
        iter([3, 0, 5]),
        torch.tensor([3, 0, 5]).unbind(),
    ):
        assert torch.equal(grouped(x, splits), right)
    for wrong in ([3, 0, 5.0], np.array([3.0, 0.0, 5.0]), [9, -1, 0]):
        with pytest.raises(ValueError, match="must be integers from 0 on that sum to the 8 rows"):
            grouped(x, wrong)


def test_grouped_gemm_makes_the_results_it_is_not_given() -> None:
    w, x, splits = [randn(24, 32, seed=i) for i in range(3)], randn(16, 32, seed=9).split([5, 0, 11]), [5, 0, 11]
    right = [F.linear(a, b) for a, b in zip(x, w, strict=True)]
    given = torch.full((11, 24), float("nan"))
    out: list[Any] = [None, None, given]
    got, *_ = te.general_grouped_gemm(w, list(x), out, None, torch.float32)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert got[2] is given
    whole, *_ = te.general_grouped_gemm(w, list(x), [None], None, BF16, m_splits=splits, single_output=True)
    assert whole.dtype == BF16
    torch.testing.assert_close(whole.float(), torch.cat(right), rtol=1e-2, atol=1e-2)
    dy = [torch.ones_like(each) for each in right]
    dw, db, _ = te.general_grouped_gemm(
        list(x), dy, [None] * 3, None, torch.float32, layout="NT", grad=True, use_bias=True
    )
    for a, sums, c, d in zip(dw, db, dy, x, strict=True):
        torch.testing.assert_close(a, c.mT @ d, rtol=1e-5, atol=1e-5)
        assert sums is not None and torch.equal(sums, c.sum(0))
    with pytest.raises(ValueError, match="use_bias=True and bias is None"):
        te.general_grouped_gemm(w, list(x), [None] * 3, None, BF16, use_bias=True)
    for wrong in ([None] * 3, [None]):
        with pytest.raises(ValueError, match="nothing to add to"):
            te.general_grouped_gemm(w, list(x), wrong, None, BF16, m_splits=splits, single_output=True, accumulate=True)
    with pytest.raises(ValueError, match="layout NT"):
        te.general_grouped_gemm(list(x), dy, [None], None, BF16, layout="NT", m_splits=splits, single_output=True)
    for rows in ([5, 0, 10], [17, -1, 0]):
        with pytest.raises(ValueError, match="sum to the 16 rows of out"):
            te.general_grouped_gemm(w, list(x), [torch.empty(16, 24)], None, BF16, m_splits=rows, single_output=True)
    with pytest.raises(ValueError, match="3 outputs"):
        te.general_grouped_gemm(w, list(x), [None] * 3, None, BF16, m_splits=splits, single_output=True)


KINDS: dict[Any, set[str]] = {
    recipe.DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    recipe.Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    recipe.Float8BlockScaling: {"float8_block_scaling"},
    recipe.MXFP8BlockScaling: {"mxfp8"},
}


@pytest.mark.parametrize("which", KINDS, ids=lambda c: c.__name__)
def test_recipes_tell_their_kind_and_format(which: Any) -> None:
    made = which()
    kinds = KINDS[recipe.DelayedScaling] | {
        "float8_current_scaling",
        "float8_block_scaling",
        "mxfp8",
        "nvfp4",
        "custom",
    }
    for kind in kinds:
        assert getattr(made, kind)() is getattr(which, kind)() is (kind in KINDS[which]), kind
    assert isinstance(made, recipe.Recipe) and isinstance(made, R.Recipe)
    default = Format.E4M3 if which in (recipe.Float8BlockScaling, recipe.MXFP8BlockScaling) else Format.HYBRID
    assert made.fp8_format is default and made.fp8_format == default.name.lower()
    for each in Format.E4M3, Format.HYBRID:
        other = which(fp8_format=each)
        assert other.fp8_format == each and other.plan.g.endswith("e5m2") == (each is Format.HYBRID)
        for again in (pickle.loads(pickle.dumps(other)), copy.deepcopy(other)):
            assert again == other and again.fp8_format is each
    assert made.fp8_dpa is made.fp8_mha is False and made.backward_override is None
    for wrong in ("hybrid", None, "HYBRID"):
        with pytest.raises(ValueError, match="must be Format"):
            which(fp8_format=wrong)
    for format in Format.E5M2, Format.E2M1:
        with pytest.raises(ValueError, match=format.name):
            which(fp8_format=format)


def test_formats_know_their_largest_values() -> None:
    assert {f.name: (f.value.max_fwd, f.value.max_bwd) for f in Format} == {
        "E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344),
    }  # fmt: skip
    assert str(Format.HYBRID) == f"{Format.HYBRID}" == "Format.HYBRID" and len({Format.E4M3, Format.E4M3}) == 1


def test_recipes_take_accumulators() -> None:
    split, fast = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)
    assert recipe.DelayedScaling().plan.fast_accum and recipe.Float8CurrentScaling().plan.fast_accum
    careful = recipe.Float8CurrentScaling(fp8_gemm_fprop=split)
    assert not careful.plan.fast_accum and careful.fp8_gemm_fprop == split and careful.fp8_gemm_dgrad == split
    assert recipe.Float8CurrentScaling(True).fp8_quant_fwd_inp.power_2_scale
    block = recipe.Float8BlockScaling(True, w_block_scaling_dim=1)
    assert (
        not block.fp8_quant_bwd_grad.power_2_scale and block.w_block_scaling_dim == 1 and block.fp8_gemm_fprop == split
    )
    for refused in (
        lambda: recipe.Float8CurrentScaling(fp8_gemm_wgrad=fast),
        lambda: recipe.Float8BlockScaling(fp8_gemm_fprop=fast),
        lambda: recipe.MXFP8BlockScaling(enable_2d_quantization=True),
        lambda: recipe.CustomRecipe(lambda role: None),
    ):
        with pytest.raises(NotImplementedError):
            refused()
    with pytest.raises(ValueError, match="MMParams"):
        recipe.Float8CurrentScaling(fp8_gemm_fprop=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("RotaryPositionEmbedding", "scaled_dot_product_attention"),
        ("make_graphed_callables", "torch.cuda.graph"), ("moe_permute", "MoEMLP"), ("optimizers", "torch.optim"), ("Float8Tensor", "fourwave.quantize"), ("MXFP8Quantizer", "fourwave.quantize"),
        ("initialize_ub", "no tensor parallelism"), ("nonsense", "has no attribute 'nonsense'"),
    ],
)  # fmt: skip
def test_what_is_missing_is_told(name: str, says: str) -> None:
    assert not hasattr(te, name)
    with pytest.raises(AttributeError, match=says):
        getattr(te, name)


@pytest.mark.parametrize("name", ["TransformerLayer", "MultiheadAttention", "DotProductAttention"])
def test_layers_that_are_not_here_have_a_name(name: str) -> None:
    """Scripts put them in tables and wrapping policies, whatever layers they then make."""
    layer = getattr(te, name)
    assert issubclass(layer, torch.nn.Module) and not isinstance(te.Linear(8, 8), layer)
    with pytest.raises(
        NotImplementedError, match=f"no {name}; instead: torch.nn.functional.scaled_dot_product_attention"
    ):
        layer(64, 4, fuse_qkv_params=True)


def test_the_package_above() -> None:
    """import transformer_engine as te"""
    assert te.pytorch.Linear is te.Linear and te.common.recipe.Format is recipe.Format


def test_streams_of_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.distributed, "_random", lambda: torch)
    tracker = te.distributed.CudaRNGStatesTracker()
    torch.manual_seed(0)
    tracker.add("model-parallel-rng", 5)
    tracker.add("other", 6)
    first = torch.rand(4)
    torch.manual_seed(0)
    with tracker.fork():
        inner = [torch.rand(4)]
    with tracker.fork("other"):
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(6)))
    assert torch.equal(torch.rand(4), first)
    with tracker.fork():
        inner.append(torch.rand(4))
    assert torch.equal(torch.cat(inner), torch.rand(8, generator=torch.Generator().manual_seed(5)))
    states = tracker.get_states()
    with pytest.raises(RuntimeError, match="out"), tracker.fork():
        torch.rand(3)
        raise RuntimeError("out")
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(2), torch.rand(10, generator=torch.Generator().manual_seed(5))[8:])
    for wrong, said in (
        (lambda: tracker.add("third", 5), "another stream has seed 5"),
        (lambda: tracker.add("other", 7), "a stream other already"),
        (lambda: tracker.fork("none").__enter__(), "no stream none, but model-parallel-rng, other"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
    tracker.reset()
    tracker.add("other", 5)
    assert list(tracker.get_states()) == ["other"]


class Recomputed(torch.autograd.Function):
    """A checkpoint as Megatron-LM writes them, with Transformer Engine's contexts around its two runs."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.run = run
        ctx.save_for_backward(x)
        with (
            torch.no_grad(),
            te.distributed.activation_recompute_forward(activation_recompute=True, recompute_phase=False),
        ):
            return run(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        again = te.distributed.activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        with torch.enable_grad(), again:
            y = ctx.run(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


def test_checkpoints_of_ones_own() -> None:
    results: list[Any] = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        mlp: Any = te.LayerNormMLP(32, 64)
        found: list[Any] = []
        for step in range(4):
            x = (randn(4, 32, seed=step) * 4**step).requires_grad_()
            with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
                y = Recomputed.apply(mlp, x) if recomputes else mlp(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad, mlp.delayed_scale.clone(), mlp.delayed_amax_history.clone()]
            with torch.no_grad():
                mlp.fc1_weight.mul_(2)  # for the weights' amax
        results.append([*found, *(p.grad for p in mlp.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    before = {name: t.clone() for name, t in mlp.state_dict().items()}
    mlp.init_fp8_metadata(num_gemms=1)  # of Megatron-LM's hooks: nothing to do
    assert all(torch.equal(t, before[name]) for name, t in mlp.state_dict().items())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_fully_sharded_data_parallel(checkpoints: bool) -> None:
    """The first kind, of Transformer Engine's example: parameters on the meta device, checkpoints of te.distributed, a group for amax."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import always_wrap_policy

    dist, results = torch.distributed, []
    tracker = te.distributed.CudaRNGStatesTracker()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for sharded in (False, True):
            torch.manual_seed(0)
            device = "meta" if sharded else "cpu"
            net: Any = torch.nn.Sequential(
                te.Linear(32, 32, device=device, get_rng_state_tracker=lambda: tracker),
                te.LayerNormMLP(32, 64, device=device, seq_length=8),
            )
            if sharded:
                net = FullyShardedDataParallel(
                    net, use_orig_params=True, auto_wrap_policy=always_wrap_policy, device_id=torch.device("cpu")
                )
                te.distributed.prepare_te_modules_for_fsdp(net)
                if checkpoints:
                    wrapper.apply_activation_checkpointing(
                        net,
                        checkpoint_wrapper_fn=lambda module: wrapper.checkpoint_wrapper(
                            module,
                            checkpoint_fn=te.distributed.checkpoint,
                            use_reentrant=False,
                            get_rng_state_tracker=lambda: tracker,
                        ),
                        check_fn=lambda module: isinstance(module, (te.Linear, te.LayerNormMLP)),
                    )
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            found = []
            for step in range(3):
                x = randn(4, 32, seed=step) * 4**step
                with te.autocast(
                    recipe=recipe.DelayedScaling(amax_history_len=2), amax_reduction_group=dist.group.WORLD
                ):
                    y = net(x)
                y.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                found.append(y.detach())
            results.append(found)
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and not torch.equal(*results[0][:2])


def test_checkpoint_ignores_what_means_nothing_without_reentrance() -> None:
    linear, x = te.Linear(8, 8), randn(2, 8).requires_grad_()
    y = te.checkpoint(linear, x, use_reentrant=False, distribute_saved_activations=True, tp_group=object())
    assert torch.equal(y, linear(x))
    with pytest.raises(NotImplementedError, match="distribute_saved_activations"):
        te.checkpoint(linear, x, distribute_saved_activations=True)


class Tracker:
    """As Megatron-LM's: streams of random numbers besides PyTorch's."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def get_states(self) -> dict[str, torch.Tensor]:
        return {"model": self.generator.get_state()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(states["model"])


@pytest.mark.parametrize("by_position", [False, True])
def test_checkpoint_replays_the_trackers_random_numbers(by_position: bool) -> None:
    grads: list[Any] = []
    after: list[torch.Tensor] = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        linear, tracker = te.Linear(32, 32), Tracker()

        def dropping(x: torch.Tensor, linear: Any = linear, tracker: Tracker = tracker) -> torch.Tensor:
            y = linear(x)
            return y * torch.rand(y.shape, generator=tracker.generator)

        losses = []
        for step in range(2):  # both forward passes before a backward pass
            x = randn(4, 32, seed=step)
            get: Any = lambda t=tracker: t  # noqa: E731
            if not checkpoints:
                y = dropping(x)
            elif by_position:  # as Megatron-LM does
                with pytest.warns(DeprecationWarning, match="given by name"):
                    y = te.checkpoint(dropping, False, get, None, x)
            else:
                y = te.checkpoint(dropping, x, get_rng_state_tracker=get)
            losses.append(y.square().sum())
        state = tracker.get_states()["model"]
        for loss in losses:
            loss.backward()
            assert torch.equal(tracker.get_states()["model"], state)
        grads.append(linear.weight.grad)
        after.append(state)
    assert grads[0] is not None and torch.equal(grads[0], grads[1]) and torch.equal(*after)
    with pytest.warns(DeprecationWarning), pytest.raises(NotImplementedError, match="activations are not distributed"):
        te.checkpoint(dropping, True, get, None, x)
