"""What can be known about the kernels on an MI300X without one: code objects, torch's build, the launches.

The sources are compiled by clang 19 (apt-get install clang-19 lld-19 llvm-19) with tests/hip_stub.h in place
of ROCm's header. The dry run goes through torch's own ROCm branch of load_inline: hipify, ninja, a hipcc (a
script around clang), the host compiler, the linker, ctypes, up to the launch, which a stand-in for ROCm's
runtime library writes down.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels_hip

TESTS = Path(__file__).parent
SOURCE = kernels_hip.PRELUDE + kernels_hip.KERNELS + kernels_hip.LAUNCHERS
ROUTING = {"count_kernel", "scan_kernel", "place_kernel"}
ROWS = {"dispatch_kernel", "combine_kernel", "combine_backward_kernel", "swiglu_kernel"}

HIPCC = r"""#!/bin/bash -e
# Stands in for ROCm's hipcc: clang compiles the device code, then the host code with the former inside.
home=$(dirname "$(dirname "$0")")
compile() { clang++-19 -x hip -nogpuinc -nogpulib -I"$home/include" "$@"; }
compile "${@:1:$#-2}" --cuda-device-only --no-gpu-bundle-output -o "${@: -1}.device"
compile "$@" --cuda-host-only -Xclang -fcuda-include-gpubinary -Xclang "${@: -1}.device"
"""

RUNTIME = r"""  // stands in for ROCm's libamdhip64: knows the kernels by name and writes their launches down
#include <stddef.h>
#include <stdio.h>
typedef struct { unsigned x, y, z; } dim3;
static struct { const void* host; const char* name; } kernels[256];
static int count;
static dim3 grids, blocks;
static size_t shared_bytes;
static void* streams;
void** __hipRegisterFatBinary(const void* data) {
    static const void* handle;
    handle = data;
    return (void**)&handle;
}
void __hipUnregisterFatBinary(void** handle) {}
void __hipRegisterFunction(void** handle, const void* host, char* device, const char* name, unsigned threads,
                           void* a, void* b, void* c, void* d, int* e) {
    kernels[count].host = host, kernels[count++].name = name;
}
int __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    grids = grid, blocks = block, shared_bytes = shared, streams = stream;
    return 0;
}
int __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void** stream) {
    *grid = grids, *block = blocks, *shared = shared_bytes, *stream = streams;
    return 0;
}
int hipLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, void* stream) {
    for (int i = 0; i < count; ++i)
        if (kernels[i].host == host)
            printf("launch %s %u %u %p\n", kernels[i].name, grid.x, block.x, *(void**)arguments[0]);
    fflush(stdout);
    return 0;
}
int hipGetLastError() { return 0; }
"""

DRY_RUN = r"""
import os, sys, types
import torch
torch.version.hip = "6.4.43482"                       # before torch.utils.cpp_extension asks
torch.cuda._is_compiled = torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
card = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", warp_size=64)
torch.cuda.get_device_properties = lambda _: card
import kernels_hip as k
k.select("hip")
print(k.status())
library = k._resolved["gpu"][0]
for dtype, width in ((torch.bfloat16, 24), (torch.float16, 16), (torch.float32, 4), (torch.float32, 3)):
    x, experts = torch.randn(9, width).to(dtype), torch.tensor([[1], [0], [2]] * 3)
    rows, offsets, positions = k._dispatch_hip(library, x, experts, 2)
    print("rows %#x" % rows.data_ptr(), flush=True)
    positions.copy_(torch.arange(9)[:, None])
    y = k._combine_hip(library, rows, torch.rand(9, 1), positions)
    k._combine_backward_hip(library, x, rows, torch.rand(9, 1), positions, x)
    if width % 2 == 0:
        k._swiglu_hip(library, x)
try:
    k.dispatch(x, experts, 2)
except ValueError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module", autouse=True)
def clang():
    if shutil.which("clang++-19") is None or shutil.which("llvm-readelf-19") is None:
        text = "clang++-19 and llvm-readelf-19 are missing: apt-get install clang-19 lld-19 llvm-19"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)


@pytest.fixture(scope="module")
def rocm(tmp_path_factory):
    """A folder that looks like /opt/rocm to torch."""
    home = tmp_path_factory.mktemp("rocm")
    for folder in ("bin", "lib", "include/hip"):
        (home / folder).mkdir(parents=True)
    shutil.copy(TESTS / "hip_stub.h", home / "include" / "hip" / "hip_runtime.h")
    (home / "bin" / "hipcc").write_text(HIPCC)
    (home / "bin" / "hipcc").chmod(0o755)
    for name, source in (("amdhip64", RUNTIME), ("c10_hip", ""), ("torch_hip", "")):
        command = f"clang-19 -w -shared -fPIC -x c - -o lib{name}.so"
        subprocess.run(command.split(), input=source, text=True, check=True, cwd=home / "lib")
    return home


def compile_for(arch, rocm, folder, source=SOURCE):
    """Code object of the kernels -> ({kernel: {figure: int}}, {kernel: [instructions]})."""
    (folder / "kernels.hip").write_text(source)
    command = ("clang++-19 -x hip -nogpuinc -nogpulib --cuda-device-only --no-gpu-bundle-output -O3 "
               f"-std=c++17 --offload-arch={arch} -I{rocm}/include -c kernels.hip -o kernels.o")
    subprocess.run(command.split(), cwd=folder, check=True)
    tool = dict(cwd=folder, check=True, capture_output=True, text=True)
    notes = subprocess.run(["llvm-readelf-19", "--notes", "kernels.o"], **tool).stdout
    figures = {re.search(r"\.name: +(\S+)", part)[1]: dict(re.findall(r"^ +\.(\w+): +(\d+)$", part, re.M))
               for part in re.split(r"^  - ", notes, flags=re.M) if ".kernarg_segment_size" in part}
    figures = {name: {key: int(value) for key, value in figure.items()} for name, figure in figures.items()}
    listing = subprocess.run(["llvm-objdump-19", "-d", "--no-show-raw-insn", "kernels.o"], **tool).stdout
    code = {part.split(">:")[0]: re.findall(r"^\s+([a-z]\w+)", part, re.M)
            for part in re.split(r"^[0-9a-f]+ <", listing, flags=re.M)[1:]}
    return figures, code


def short(name):
    """The kernel's name without its mangling."""
    return re.match(r"_Z\d+(\w+?_kernel)", name)[1]


@pytest.fixture(scope="module", params=["gfx942", "gfx90a"])
def code_object(request, rocm, tmp_path_factory):
    return compile_for(request.param, rocm, tmp_path_factory.mktemp(request.param))


def test_code_object_holds_every_kernel_without_spills_or_scratch(code_object):
    figures, _ = code_object
    assert {short(name) for name in figures} == ROUTING | ROWS and len(figures) == 3 + 6 * 4
    for name, figure in figures.items():
        assert figure["wavefront_size"] == 64, name
        assert figure["vgpr_spill_count"] == figure["sgpr_spill_count"] == 0, name
        assert figure["private_segment_fixed_size"] == 0, f"{name} uses scratch"
        assert figure["group_segment_fixed_size"] <= (65536 if short(name) in ROUTING else 0), name
        # 128 leave four waves a SIMD: with 64 bytes a lane in flight, several times what the latency needs.
        assert figure["vgpr_count"] <= 128, f"{name}: {figure['vgpr_count']} registers"


def test_row_kernels_move_16_bytes_and_divide_no_integers(code_object):
    _, code = code_object
    wide = {name: instructions for name, instructions in code.items() if re.search(r"Li[48]EE", name)}
    assert len(wide) == 3 * 4
    for name, instructions in wide.items():
        assert "global_load_dwordx4" in instructions and "global_store_dwordx4" in instructions, name
        slow = {i for i in instructions if re.match("global_(load|store)_u?(short|byte)|flat_|scratch_", i)}
        assert not slow, f"{name}: {slow}"
        if "swiglu" not in name:
            assert not {i for i in instructions if i.startswith("v_rcp")}, f"{name} divides"


def test_routing_counts_in_lds_and_shuffles_by_permutes(code_object):
    code = {short(name): found for name, found in code_object[1].items() if short(name) in ROUTING}
    assert "ds_add_u32" in code["count_kernel"]
    assert "ds_bpermute_b32" in code["scan_kernel"] and "ds_bpermute_b32" in code["place_kernel"]
    everything = {i for found in code_object[1].values() for i in found}
    assert not [i for i in everything if re.search("atomic.*_p?k?_?b?f(16|32|64)|ds_(p?k?_?)add.*_b?f", i)]


def test_figures_would_show_scratch(rocm, tmp_path):
    """The assertions above can fail: loops over packs that are not unrolled put the packs in memory."""
    planted = SOURCE.replace("#pragma unroll\n", "#pragma nounroll\n")
    figures, code = compile_for("gfx942", rocm, tmp_path, planted)
    name = next(name for name in figures if "combine_kernelI4bf16Li8E" in name)
    assert figures[name]["private_segment_fixed_size"] and any("scratch_" in i for i in code[name])


def test_radeon_code_object_has_waves_of_32(rocm, tmp_path):
    figures, _ = compile_for("gfx1100", rocm, tmp_path)
    assert len(figures) == 27 and all(figure["wavefront_size"] == 32 for figure in figures.values())


def dry_run(rocm, cache, script=DRY_RUN):
    environment = {**os.environ, "ROCM_HOME": str(rocm), "LD_LIBRARY_PATH": f"{rocm}/lib",
                   "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(cache),
                   "PYTHONPATH": str(TESTS.parent)}
    environment.pop("PYTORCH_ROCM_ARCH", None)
    return subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=rocm, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_dry_run_builds_through_torch_and_launches_every_kernel(rocm, tmp_path):
    cache = tmp_path / "a folder"                               # two at once, and a space in the path
    processes = [dry_run(rocm, cache) for _ in range(2)]
    for output in [process.communicate(timeout=300)[0] for process in processes]:
        assert "kernels: hip, compiled for gfx942, 64 lanes" in output, output
        launches = re.findall(r"launch (\S+) (\d+) (\d+) (\S+)", output)
        names = [short(name) for name, *_ in launches]
        assert names[:4] == ["count_kernel", "scan_kernel", "place_kernel", "dispatch_kernel"]
        assert set(names) == ROUTING | ROWS
        for kind in ("I4bf16Li8E", "IDF16_Li8E", "IfLi4E", "IfLi1E"):
            assert any(f"dispatch_kernel{kind}" in name for name, *_ in launches), kind
        for name, blocks, threads, _ in launches:       # 9 waves of 64 are 3 blocks of 256; routing: 1 chunk
            expected = (1, 1024) if "scan" in name else (1, 256) if short(name) in ROUTING else (3, 256)
            assert (int(blocks), int(threads)) == expected, name
        rows = re.findall(r"rows (\S+)", output)
        assert rows == [address for name, _, _, address in launches if "dispatch" in name], "first argument"
        assert "refused: --kernels hip: the tensor is on cpu" in output
    assert [path.suffix for path in (cache / "zaya1_kernels").iterdir()] == [".so"]
    assert "launch" in dry_run(rocm, cache).communicate(timeout=60)[0]  # a third takes it from the cache


def test_hipify_leaves_the_device_code_alone(rocm, tmp_path):
    script = DRY_RUN.split("import kernels_hip")[0] + f"""
import kernels_build
import kernels_hip as k
os.environ["PYTORCH_ROCM_ARCH"] = "gfx90a"
kernels_build.compile_gpu({str(tmp_path)!r}, [k.PRELUDE, k.KERNELS, k.LAUNCHERS])
import pathlib
texts = [path.read_text() for path in pathlib.Path({str(tmp_path)!r}).glob("*.hip")]
print("hipified", len(texts), all(k.KERNELS in t and k.LAUNCHERS in t for t in texts))
"""
    output = dry_run(rocm, tmp_path, script).communicate(timeout=120)[0]
    assert "hipified 1 True" in output, output


def test_a_broken_source_is_one_line_and_plain_goes_on(rocm, tmp_path):
    script = DRY_RUN.split("k.select")[0] + """
k.KERNELS = k.KERNELS.replace("const int token = MY_TOKEN;", "const int token = MY_TOKENS;", 1)
print(k.status())
print(len(k.dispatch(torch.randn(3, 4), torch.tensor([[0], [1], [0]]), 2)[0]), "rows")
k.select("hip")
"""
    output = dry_run(rocm, tmp_path, script).communicate(timeout=120)[0]
    assert re.search(r"^kernels: plain torch operations \(.*error: .* 'MY_TOKENS'\)$", output, re.M), output
    assert "3 rows" in output and "ValueError: --kernels hip cannot run" in output


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_compiles_the_same_source_for_sm_90(tmp_path):
    (tmp_path / "kernels.cu").write_text(SOURCE)
    command = "nvcc -arch=sm_90 -std=c++17 -O3 -ptx kernels.cu -o kernels.ptx"
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = (tmp_path / "kernels.ptx").read_text().split(".entry ")[1:]
    assert len(entries) == 27
    for entry in entries:
        name = entry.split("(")[0]
        assert ".local" not in entry, f"{name} puts registers in memory"
        if re.search(r"Li[48]EE", name):
            assert re.search(r"ld\.global(\.nc)?\.v4", entry) and "st.global.v4" in entry, name
