"""Compiles the source of kernels_hip.py and calls it: on the GPU at hand, or on the CPU to test and learn.

`load_gpu` lets torch.utils.cpp_extension.load_inline translate and compile the source, with hipcc on a ROCm
build of torch, with nvcc on a CUDA one, for the present card (or as PYTORCH_ROCM_ARCH, TORCH_CUDA_ARCH_LIST
say). `load_shim` compiles the very same source as C++, behind tests/hip_shim.h, which runs a block's threads
as fibers with waves of 64 or 32 lanes. Either gives a `Library`, whose launchers are called through ctypes.

Glossary: launcher: a C function of the source that starts kernels on a stream; pack: 16 bytes of a row;
lanes: threads of a wave. Left out: building ahead of time. Run: `python kernels_build.py`.
"""
import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}     # as BY_TYPE in the launchers tells them
THREADS = 256                                                       # of a block, as in the kernels


class Library:
    """The compiled kernels: hands the addresses of tensors and the current stream to a launcher."""

    def __init__(self, path, device, lanes, name):
        self.functions, self.device, self.lanes, self.name = ctypes.CDLL(str(path)), device, lanes, name

    def call(self, launcher, *values):
        """Tensors, None (a null pointer) and ints in the launcher's order. RuntimeError if it fails."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert all(t.is_contiguous() and t.device == tensors[0].device for t in tensors), launcher
        values = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else v for v in values]
        on_gpu = tensors[0].is_cuda
        with torch.cuda.device(tensors[0].device) if on_gpu else contextlib.nullcontext():
            stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
            code = getattr(self.functions, launcher)(*values, ctypes.c_void_p(stream))
        if code:
            why = f"error {code}" if on_gpu else self.functions.shim_error().decode()
            raise RuntimeError(f"{launcher} failed: {why}")

    def call_rows(self, launcher, *values, rows, tokens, width):
        """A row kernel. rows: the tensors that it moves by packs (or None), `width` elements in each row."""
        size = rows[0].element_size()
        wide = width * size % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in rows if t is not None)
        packs, blocks = width * size // 16 if wide else width, -(-tokens * self.lanes // THREADS)
        if tokens and width:
            self.call(launcher, *values, tokens, packs, TYPES[rows[0].dtype], int(wide), blocks)


def cache_folder():
    """Where torch keeps what it compiles."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    return Path(cache).absolute() / "zaya1_kernels"


def cached_library(key, compile_in):
    """Path of the library with this key (a string), compiled by `compile_in(folder)` if it is not there yet.

    Each build has a folder of its own and is renamed into place at once, so that neither the lock of a build
    that was killed nor another process that builds at the same time can be in the way.
    """
    folder = cache_folder()
    target = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as work:
            os.replace(compile_in(work), target)
    return target


def compile_gpu(folder, sources):
    """Compile with torch's own settings for hipcc or nvcc -> path of the library in `folder`."""
    from torch.utils import cpp_extension
    variable, arch = _architecture()
    # The ninja of a virtual environment is not on PATH when its python was called by path.
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    changes = {"PATH": path, variable: arch}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        for tool in ("ninja", cpp_extension.get_cxx_compiler()):
            if shutil.which(tool) is None:
                raise FileNotFoundError(f"{tool} is not on PATH: install it to compile the kernels")
        return cpp_extension.load_inline(
            "zaya1_kernels", cpp_sources=['extern "C" int zaya1_kernels() { return 1; }'],
            cuda_sources=sources, extra_cuda_cflags=["-O3"], build_directory=folder,
            with_cuda=True, is_python_module=False, no_implicit_headers=True)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _architecture():
    """The variable that tells torch for which card to compile, and its value."""
    variable = "PYTORCH_ROCM_ARCH" if torch.version.hip else "TORCH_CUDA_ARCH_LIST"
    if os.environ.get(variable):
        return variable, os.environ[variable]
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return variable, card.gcnArchName.split(":")[0] if torch.version.hip else f"{card.major}.{card.minor}"


def load_gpu(sources):
    """Library of these sources, a list of texts, for this GPU. FileNotFoundError: no GPU, compiler."""
    if not torch.cuda.is_available():
        raise FileNotFoundError("no GPU is visible to torch")
    key = "".join([*sources, torch.__version__, *_architecture()])
    path = cached_library(key, lambda folder: compile_gpu(folder, sources))
    lanes = torch.cuda.get_device_properties(torch.cuda.current_device()).warp_size
    return Library(path, "cuda", lanes, f"hip, compiled for {_architecture()[1]}, {lanes} lanes")


def load_shim(source, lanes=64, schedule="forward", seed=1):
    """Library of this source through the CPU shim; schedule: threads run "forward", "reverse" or "random".

    There is one such library in a process: the settings of the last call hold for all its users.
    """
    source = (Path(__file__).parent / "tests" / "hip_shim.h").read_text() + source

    def compile_in(folder):
        Path(folder, "shim.cpp").write_text(source)
        flags = "-O2 -std=c++17 -fPIC -shared -w -ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE"
        command = [os.environ.get("CXX", "g++"), *flags.split(), "shim.cpp", "-o", "shim.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return os.path.join(folder, "shim.so")

    library = Library(cached_library(source, compile_in), "cpu", lanes, f"shim, {lanes} lanes on the CPU")
    library.functions.shim_error.restype = ctypes.c_char_p
    library.functions.shim_configure(lanes, ("forward", "reverse", "random").index(schedule), seed)
    return library


if __name__ == "__main__":
    for name in ("hipcc", "nvcc", "ninja", os.environ.get("CXX", "g++")):
        print(f"{name:6} {shutil.which(name) or 'is not on PATH'}")
    print(f"GPU    {torch.cuda.is_available()}; libraries are kept in {cache_folder()}")
    triple = """extern "C" int triple(int* out, const int* numbers, int count, void* stream) {
        for (int i = 0; i < count; ++i) out[i] = 3 * numbers[i];
        return 0;
    }"""
    library, numbers = load_shim(triple), torch.arange(5, dtype=torch.int32)
    out = torch.empty_like(numbers)
    library.call("triple", out, numbers, 5)
    print(f"a launcher compiled for the CPU, called on {numbers.tolist()}: {out.tolist()}")
