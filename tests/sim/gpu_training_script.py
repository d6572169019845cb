"""A training script as it is written for a GPU, for test_tool.py: kernels in backward passes, hooks, checkpoints and custom operators.

It runs unchanged on a machine with a GPU.
"""

# mypy: disable-error-code="arg-type,operator,union-attr"

import copy
import sys

import flydsl.compiler as flyc
import torch
from flydsl import expr as fx
from torch.utils.checkpoint import checkpoint

BLOCK = 64
wrong: list[str] = []
seen: list[torch.Tensor] = []


def check(name, truth):
    if not truth:
        wrong.append(name)


def on_gpu(t):
    return (
        isinstance(t, torch.Tensor) and t.is_cuda and not t.is_cpu and t.device.type == "cuda" and t.get_device() == 0
    )


def on_host(t):
    return isinstance(t, torch.Tensor) and not t.is_cuda and t.is_cpu and t.device.type == "cpu"


def off(name, got, want):
    check(f"{name}: {got} for {want}", on_gpu(got) and torch.equal(got.detach().cpu(), want.detach()))


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def multiply_kernel(x: fx.Tensor, y: fx.Tensor, out: fx.Tensor):
    i = fx.Int32(fx.block_idx.x) * BLOCK + fx.Int32(fx.thread_idx.x)
    out[i] = x[i] * y[i]


@flyc.jit
def launch(x: fx.Tensor, y: fx.Tensor, out: fx.Tensor, stream: fx.Stream = fx.Stream(None)):
    multiply_kernel(x, y, out).launch(grid=(2, 1, 1), block=(BLOCK, 1, 1), stream=stream)


def multiply(x, y):
    out = torch.full(x.shape, float("nan"), device=x.device)
    launch(x, y, out)
    return out


class Square(torch.autograd.Function):
    """Saves an input and its own output; the gradient, 2 x g, uses both kinds."""

    @staticmethod
    def forward(ctx, x):
        square = multiply(x.detach(), x.detach())
        ctx.save_for_backward(x, square)
        return square

    @staticmethod
    def backward(ctx, grad):
        x, square = ctx.saved_tensors
        seen.extend((x, square, grad))
        grad = grad.contiguous()
        check("in backward: on the GPU", all(on_gpu(t) for t in (x, square, grad, torch.empty(3, device="cuda"))))
        check("in backward: the host", on_host(torch.empty(3)) and on_host(grad.cpu()))
        check("in backward: the output saved", torch.equal(multiply(x, x), multiply(square, torch.ones_like(square))))
        return multiply(grad, multiply(x, torch.full_like(grad, 2.0)))


host = torch.arange(2.0 * BLOCK) + 1
weight = torch.arange(2.0 * BLOCK) % 7 - 2

# A kernel in a Function's backward, between PyTorch's own.
x = host.cuda().requires_grad_()
y = Square.apply(x * 1)
hooked = []
y.register_hook(lambda grad: hooked.append(multiply(grad, grad)))
(y * weight.cuda()).sum().backward()
check("a leaf", x.is_leaf and torch.randn(3, device="cuda", requires_grad=True).is_leaf and len(seen) == 3)
off("backward", x.grad, 2 * host * weight)
check("the gradient keeps its identity", x.grad is x.grad)
off("a kernel in a hook", hooked[0], weight * weight)
off("a kernel with a gradient", multiply(x.grad, x.grad), (2 * host * weight) ** 2)
(grad,) = torch.autograd.grad(Square.apply(x).sum(), x)
off("autograd.grad", grad, 2 * host)
twin = copy.deepcopy(x)
check("deepcopy of a leaf", on_gpu(twin) and twin.is_leaf and twin.requires_grad and torch.equal(twin.grad, x.grad))

# Checkpoints run the forward again in the backward pass.
for reentrant in (False, True):
    x = host.cuda().requires_grad_()
    y = checkpoint(lambda t: Square.apply(Square.apply(t / 16)), x, use_reentrant=reentrant)
    (y * weight.cuda()).sum().backward()
    off(f"checkpoint, reentrant {reentrant}", x.grad, 4 * (host / 16) ** 3 / 16 * weight)

# Gradients cross between host and GPU with their tensors.
x = host.clone().requires_grad_()
back = Square.apply(x.cuda()).cpu()
check("a copy to the host", on_host(back))
(back * weight).sum().backward()
check("a host leaf's gradient", on_host(x.grad) and torch.equal(x.grad, 2 * host * weight))
x = host.cuda().requires_grad_()
(Square.apply(x).to("cpu", torch.float64) * weight).sum().backward()
off("a GPU leaf's gradient, through the host", x.grad, 2 * host * weight)

# Custom operators: Python below PyTorch's dispatcher.


@torch.library.custom_op("gpu_training_script::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    check("in an operator: on the GPU", on_gpu(x) and on_gpu(y))
    return multiply(x, y)


product.register_autograd(
    lambda ctx, grad: (
        product(grad.contiguous(), ctx.saved_tensors[1]),
        product(grad.contiguous(), ctx.saved_tensors[0]),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("gpu_training_script::product_", mutates_args=("x",), device_types="cuda")
def product_(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(product(x, y))


@torch.library.custom_op("gpu_training_script::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    check("in an operator: on the host", on_host(x) and on_host(torch.empty_like(x)))
    return x * 2


x = host.cuda().requires_grad_()
(product(x, x) * weight.cuda()).sum().backward()
off("an operator", x.grad, 2 * host * weight)
y = host.cuda()
product_(y, y)
off("an operator in place", y, host**2)
check("an operator on the host", on_host(twice(host)) and torch.equal(twice(host), 2 * host))

# A training step of a module.
if sys.argv[1:] == ["--module"]:
    import fourwave as fw
    from fourwave import recipes

    torch.manual_seed(1)
    model = fw.nn.Linear(64, 48, device="cuda").to(torch.bfloat16)
    exact = torch.nn.Linear(64, 48, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    x = torch.randn(32, 64).bfloat16()
    dy = torch.randn(32, 48).bfloat16()
    given, truth = x.cuda().requires_grad_(), x.double().requires_grad_()
    with fw.use_backend("flydsl"), fw.autocast(recipe=recipes.CurrentScaling()):
        out = model(given)
    out.backward(dy.cuda())
    wanted = exact(truth)
    wanted.backward(dy.double())
    for name, got, want in (
        ("y", out, wanted), ("dx", given.grad, truth.grad), ("dw", model.weight.grad, exact.weight.grad), ("db", model.bias.grad, exact.bias.grad),
    ):  # fmt: skip
        error = ((got.detach().cpu().double() - want).norm() / want.norm()).item()
        check(f"fw.nn.Linear, {name}: relative error {error}", on_gpu(got) and error < 0.08)
    before = model.weight.detach().clone()
    optimizer.step()
    check("a step", on_gpu(model.weight) and torch.equal(model.weight, before - 0.125 * model.weight.grad))
if wrong:
    sys.exit("\n".join(wrong))
print("all right")
