"""A script as it is written for a GPU, for test_tool.py: checks what PyTorch promises about devices, launches a kernel, exits with what is wrong.

It runs unchanged on a machine with a GPU.
"""

import copy
import sys

import flydsl.compiler as flyc
import numpy as np
import torch
from flydsl import expr as fx
from torch.utils.dlpack import from_dlpack

BLOCK = 256
wrong: list[str] = []


def check(name, truth):
    if not truth:
        wrong.append(name)


def on_gpu(t):
    return (
        isinstance(t, torch.Tensor) and t.is_cuda and not t.is_cpu and str(t.device) == "cuda:0" and t.get_device() == 0
    )


def on_host(t):
    return isinstance(t, torch.Tensor) and not t.is_cuda and t.is_cpu and t.device.type == "cpu"


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def scale_kernel(x: fx.Tensor, y: fx.Tensor, factor: fx.Float32):
    i = fx.Int32(fx.block_idx.x) * BLOCK + fx.Int32(fx.thread_idx.x)
    y[i] = x[i] * factor


@flyc.jit
def scale(x: fx.Tensor, y: fx.Tensor, factor: fx.Float32, blocks: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    scale_kernel(x, y, factor).launch(grid=(blocks, 1, 1), block=(BLOCK, 1, 1), stream=stream)


host = torch.arange(16, dtype=torch.float32)
gpu = host.cuda()

# Host to GPU: a copy, by every way to say it.
for name, tensor in {
    "cuda()": host.cuda(), "cuda(0)": host.cuda(0), "cuda(device=)": host.cuda(device="cuda:0"), "cuda(non_blocking)": host.cuda(non_blocking=True),
    "to(str)": host.to("cuda"), "to(device)": host.to(torch.device("cuda", 0)), "to(device=)": host.to(device="cuda:0"), "to(0)": host.to(0),
    "to(str, dtype)": host.to("cuda", torch.float32), "to(device=, dtype=)": host.to(device="cuda", dtype=torch.float32),
    "to(other)": host.to(gpu), "type_as": host.type_as(gpu), "pinned": host.pin_memory().cuda(non_blocking=True),
    "as_tensor": torch.as_tensor(host, device="cuda"), "from numpy": torch.from_numpy(host.numpy()).cuda(), "tensor": torch.tensor(host.tolist(), device="cuda"),
}.items():  # fmt: skip
    check(f"host to GPU, {name}: on the GPU", on_gpu(tensor))
    before = host.clone()
    tensor.fill_(-1)
    check(f"host to GPU, {name}: a copy", torch.equal(host, before))

# GPU to host: a copy as well.
for name, tensor in {
    "cpu()": gpu.cpu(), "to(str)": gpu.to("cpu"), "to(device=)": gpu.to(device=torch.device("cpu")), "to(str, dtype)": gpu.to("cpu", torch.float32),
    "to(other)": gpu.to(host), "type_as": gpu.type_as(host), "as_tensor": torch.as_tensor(gpu, device="cpu"),
}.items():  # fmt: skip
    check(f"GPU to host, {name}: on the host", on_host(tensor))
    tensor.fill_(-1)
    check(f"GPU to host, {name}: a copy", torch.equal(gpu.cpu(), host))
array = gpu.cpu().numpy()
array[:] = -1
check("numpy of a copy", torch.equal(gpu.cpu(), host))
for name, convert in {"numpy()": lambda: gpu.numpy(), "np.asarray": lambda: np.asarray(gpu)}.items():
    try:
        convert()
        check(f"{name} of a GPU tensor raises", False)
    except TypeError:
        pass

# What is there already stays: no copy.
for name, tensor in {
    "to": gpu.to("cuda"),
    "cuda()": gpu.cuda(),
    "to(dtype)": gpu.to(torch.float32),
    "to(other)": gpu.to(gpu),
}.items():
    check(f"GPU to GPU, {name}: the same", tensor.data_ptr() == gpu.data_ptr() and on_gpu(tensor))
check("host stays", host.to("cpu").data_ptr() == host.data_ptr() and host.cpu().data_ptr() == host.data_ptr())

# Factories.
for name, tensor in {
    "zeros": torch.zeros(4, device="cuda"), "empty": torch.empty((4,), device="cuda:0", dtype=torch.bfloat16), "ones": torch.ones(2, device=gpu.device),
    "number": torch.zeros(4, device=0), "randn": torch.randn(4, 4, device=torch.device("cuda")), "full": torch.full((2,), 1.0, device="cuda"),
    "arange": torch.arange(4, device="cuda"), "randint": torch.randint(0, 5, (3,), device="cuda"), "randperm": torch.randperm(5, device="cuda"),
    "empty_strided": torch.empty_strided((2, 2), (2, 1), device="cuda"), "eye": torch.eye(3, device="cuda"), "zeros_like": torch.zeros_like(gpu),
    "empty_like": torch.empty_like(host, device="cuda"), "randn_like": torch.randn_like(gpu), "new_zeros": gpu.new_zeros(3), "new_empty": gpu.new_empty((3,)),
    "requires_grad": torch.randn(3, device="cuda", requires_grad=True), "from_dlpack": from_dlpack(gpu), "deepcopy": copy.deepcopy(gpu),
}.items():  # fmt: skip
    check(f"{name}: on the GPU", on_gpu(tensor))
check("from_dlpack shares", from_dlpack(gpu).data_ptr() == gpu.data_ptr() and on_host(from_dlpack(host)))
check("deepcopy copies", copy.deepcopy(gpu).data_ptr() != gpu.data_ptr())
check("zeros_like to the host", on_host(torch.zeros_like(gpu, device="cpu")))
check("a plain factory", on_host(torch.zeros(3)))
with torch.device("cuda"):
    check("with torch.device", on_gpu(torch.zeros(4)) and on_gpu(torch.tensor([1.0])))
torch.set_default_device("cuda")
check(
    "default device",
    on_gpu(torch.zeros(3)) and on_host(torch.zeros(3, device="cpu")) and torch.get_default_device().type == "cuda",
)
torch.set_default_device("cpu")
check("default device back", on_host(torch.zeros(3)))

# Results of GPU tensors are on the GPU, views share.
square = gpu.view(4, 4)
for name, tensor in {
    "matmul": square @ square, "cat": torch.cat([gpu, gpu]), "stack": torch.stack([gpu, gpu]), "slice": gpu[2:], "transpose": square.T, "add": gpu + 1,
    "bits": gpu.view(torch.int32), "contiguous": square.t().contiguous(), "half": gpu.half(), "fp8": gpu.to(torch.float8_e4m3fn), "detach": gpu.detach(),
    "chunk": gpu.chunk(2)[0], "max": square.max(dim=0).values, "where": torch.where(gpu > 1, gpu, gpu), "parameter": torch.nn.Parameter(gpu),
    "module.cuda": torch.nn.Linear(3, 3).cuda().weight, "module.to": torch.nn.Linear(3, 3).to("cuda").weight, "module": torch.nn.Linear(3, 3, device="cuda").weight,
}.items():  # fmt: skip
    check(f"{name}: on the GPU", on_gpu(tensor))
check("a slice shares", gpu[2:].data_ptr() == gpu.data_ptr() + 8)
target = torch.empty(16)
target.copy_(gpu)
check("copy_ to the host", on_host(target) and torch.equal(target, host))
torch.testing.assert_close(gpu.cpu(), host)
check("repr", "cuda:0" in repr(gpu) and "cuda" not in repr(host))

# Generators: the seed decides, whatever the device.
for seed in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):
    draws = []
    for _ in range(2):
        seed(5)
        draws.append(torch.randn(8, device="cuda"))
    check(f"{seed.__name__} repeats", torch.equal(*draws) and draws[0].unique().numel() == 8)
draws = [torch.randn(8, device="cuda", generator=torch.Generator(device="cuda").manual_seed(s)) for s in (1, 1, 2)]
check("generator", torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2]))
check(
    "generator's class",
    isinstance(torch.Generator(), torch.Generator) and isinstance(torch.default_generator, torch.Generator),
)

# Device questions.
properties = torch.cuda.get_device_properties(0)
check("properties", properties.gcnArchName.startswith("gfx") and properties.multi_processor_count > 0)
check("available", torch.cuda.is_available() and torch.cuda.device_count() >= 1 and torch.cuda.current_device() == 0)
check(
    "accelerator", torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
)
check("hip", torch.version.hip is not None)
check("memory", min(torch.cuda.mem_get_info()) > 0)

# Streams and events round a launch.
x = torch.randn(4 * BLOCK, device="cuda")
y = torch.full_like(x, float("nan"))
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.device(0), torch.cuda.stream(side):
    start.record()
    scale(x, y, 3.0, 4, stream=side)
    end.record(side)
y.record_stream(side)
end.synchronize()
side.synchronize()
torch.cuda.synchronize()
check(
    "stream's class", isinstance(side, torch.cuda.Stream) and isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
)
check("events", end.query() and start.elapsed_time(end) > 0)
check("the kernel's result", torch.equal(y, 3 * x) and torch.equal(y.cpu(), 3 * x.cpu()))
check("the script's arguments", sys.argv[1:] == ["--size", "4"])
if wrong:
    sys.exit("\n".join(wrong))
print("all right")
