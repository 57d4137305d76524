"""Expert dispatch and combine: every token's row to its experts and back, in HIP, with a plain torch twin.

    dispatch   rows[position[n, k]] = x[n]                    in expert order, stable by slot n*K + k
    combine    y[n] = sum_k p[n, k] * rows[position[n, k]]    a skipped slot (position -1) adds p[n, k] * x[n]
    swiglu     a = silu(gate) * up                            the elementwise middle of an expert

ZAYA1 (arXiv 2511.17127; 2605.05365) routes each token to one of E experts or to a skip class,
index E, whose expert is the identity. The grouped products between dispatch and combine read `offsets` on the
device, so the CPU never waits for the router. Backward: of dispatch, combine with weights of one; of combine,
for each slot one row and one dot product.

count_kernel (histogram of each chunk of slots), scan_kernel (exclusive prefix sum over [expert][chunk]) and
place_kernel (the row of each slot, by ballots) route, in integers. The others move rows: one wave a row, 16
bytes a lane. No float is ever added by an atomic, so results repeat bitwise. One source serves waves of 64
lanes (MI300X) and of 32 (RDNA, NVIDIA); kernels_build.py compiles it when a GPU first needs it, or with
tests/hip_shim.h for the CPU.

Glossary: x_ND tokens; experts_NK chosen classes (e in the router's equations), weights_NK their probabilities
(p); rows (N*K, D) in expert order; offsets (E,) inclusive ends; positions (N, K) row of each slot; slot n*K +
k; chunk CHUNK slots; pack 16 bytes of a row. Letters: N tokens, K choices a token (top-k), E experts, D
hidden, F expert hidden.

Left out: combine joined with the residual affine. It would save 4 of 14 bytes an element over an affine that
is one pass by itself (torch.compile makes it one), and needs four column sums in its backward. float64 and
more than 1024 experts run plain.

NOTHING HERE WAS RUN ON AN AMD CARD. Shown without one: right results through the shim at 64 and 32 lanes,
code objects for gfx942 and gfx90a, the build up to the launch. Speeds are bytes on paper until somebody
measures them.
"""
import functools

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels_build import TYPES, load_gpu, load_shim

# ----------------------------------------------------------------------------------------- plain twins


def dispatch_ref(x_ND, experts_NK, num_experts):
    """Plain twin of `dispatch`: same shapes, torch operations only, differentiable by their own rules."""
    flat = experts_NK.reshape(-1)
    slot_of_row = flat.argsort(stable=True)
    bounds = torch.arange(num_experts, device=flat.device)
    offsets = torch.searchsorted(flat.index_select(0, slot_of_row), bounds, right=True, out_int32=True)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot.scatter_(0, slot_of_row, torch.arange(flat.numel(), device=flat.device))
    positions = row_of_slot.masked_fill_(flat >= num_experts, -1).view_as(experts_NK)
    return x_ND.index_select(0, slot_of_row // experts_NK.shape[1]), offsets, positions


def combine_ref(rows, weights_NK, positions, x_ND=None):
    """Plain twin of `combine`: same shapes. weights_NK None stands for ones (the backward of dispatch)."""
    wide, skips, total = _wide(rows), _may_skip(positions), None
    for k in range(positions.shape[1]):
        row = positions[:, k]
        part = rows.index_select(0, row.clamp(min=0) if skips else row)
        if skips:
            part = torch.where(row[:, None] < 0, 0 if x_ND is None else x_ND, part)
        if weights_NK is not None:
            part, weight = part.to(wide), weights_NK[:, k, None].to(wide)
            # In place where autograd does not look: on a CPU fresh memory costs more than the product.
            part = part * weight if torch.is_grad_enabled() else part.mul_(weight)
        total = part if total is None else total.to(wide) + part
    return total.to(rows.dtype)


def combine_backward_ref(grad_ND, rows, weights_NK, positions, x_ND):
    """Plain gradients of combine -> grad_rows (N*K, D), grad_weights (N, K), grad_x (N, D) or None.

    It gathers by row: index_copy_ into the rows takes four times as long as index_select on a CPU.
    """
    wide, skips, flat = _wide(rows), _may_skip(positions), positions.reshape(-1)
    slots = flat.numel()
    slot_of_row = flat.new_zeros(slots + 1)                 # one more: all skipped slots are thrown there
    slot_of_row.scatter_(0, flat.masked_fill(flat < 0, slots), torch.arange(slots, device=flat.device))
    slot_of_row = slot_of_row[:slots]
    grad_rows = grad_ND.index_select(0, slot_of_row // positions.shape[1]).to(wide)
    grad_weights = (rows.to(wide) * grad_rows).sum(-1).index_select(0, flat.clamp(min=0)).view_as(positions)
    grad_rows.mul_(weights_NK.reshape(-1, 1).index_select(0, slot_of_row).to(wide))
    grad_x = None
    if skips:
        skipped = positions < 0
        tail = torch.arange(slots, device=flat.device) >= slots - skipped.sum()
        grad_rows.masked_fill_(tail[:, None], 0)
        skip_dots = 0 if x_ND is None else (x_ND.to(wide) * grad_ND.to(wide)).sum(-1, keepdim=True)
        grad_weights = torch.where(skipped, skip_dots, grad_weights)
        if x_ND is not None:
            skip_weight = weights_NK.to(wide).masked_fill(~skipped, 0).sum(-1, keepdim=True)
            grad_x = (grad_ND.to(wide) * skip_weight).to(x_ND.dtype)
    return grad_rows.to(rows.dtype), grad_weights.to(weights_NK.dtype), grad_x


def swiglu_ref(h):
    """Plain twin of `swiglu`."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def _may_skip(positions):
    """Whether a slot may be skipped. Looked up on the CPU only: a GPU would have to be waited for, and a
    compiled graph would end there."""
    return (positions.device.type != "cpu" or torch.compiler.is_compiling()
            or bool((positions < 0).any()))


# ----------------------------------------------------------------------------------------- device code
# The prelude names what differs between platforms; tests/hip_shim.h is its third form, for the CPU.

PRELUDE = r"""
#if defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_runtime.h>
#if defined(__GFX9__)       // CDNA: MI200, MI300X. A constant, so that divisions by it become shifts
#define LANES 64
#else
#define LANES 32
#endif
#define BALLOT(p) ((unsigned long long)__ballot(p))
#define SHUFFLE(v, lane) __shfl(v, lane)
#define LAUNCH(kernel, blocks, threads, stream, ...) \
    hipLaunchKernelGGL(kernel, dim3(blocks), dim3(threads), 0, (hipStream_t)(stream), __VA_ARGS__)
#define LAST_ERROR() ((int)hipGetLastError())
typedef _Float16 fp16;
static __device__ inline float to_float(fp16 h) { return (float)h; }
static __device__ inline void from_float(fp16& h, float f) { h = (fp16)f; }
#else
#include <cuda_fp16.h>
#define LANES 32
#define BALLOT(p) ((unsigned long long)__ballot_sync(~0u, p))
#define SHUFFLE(v, lane) __shfl_sync(~0u, v, lane)
#define LAUNCH(kernel, blocks, threads, stream, ...) \
    kernel<<<dim3(blocks), dim3(threads), 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#define LAST_ERROR() ((int)cudaGetLastError())
typedef __half fp16;
static __device__ inline float to_float(fp16 h) { return __half2float(h); }
static __device__ inline void from_float(fp16& h, float f) { h = __float2half(f); }
#endif
#define SMALLEST_WAVE 32    // sizes shared arrays; never used as the number of lanes
#define POPCOUNT(m) __popcll(m)
"""

KERNELS = r"""
#define THREADS 256          // a block of every kernel but the scan
#define SCAN_THREADS 1024
#define CHUNK 1024           // slots that one block counts and places
#define MAX_EXPERTS 1024
#define TILE 4               // packs that a lane of combine keeps in flight
typedef long long int64;

// 1. How many slots of each chunk go to each expert: counts[expert][chunk].
__global__ void __launch_bounds__(THREADS)
count_kernel(int* counts, const int64* experts, int slots, int num_experts, int chunks) {
    __shared__ int histogram[MAX_EXPERTS];
    for (int e = threadIdx.x; e < num_experts; e += THREADS) histogram[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const int slot = blockIdx.x * CHUNK + i;
        if (slot < slots && experts[slot] < num_experts) atomicAdd(&histogram[experts[slot]], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts; e += THREADS) counts[e * chunks + blockIdx.x] = histogram[e];
}

// 2. Exclusive prefix sum over the flat [expert][chunk] array, in place, by one block. What stands there
//    afterwards is the first row of that expert's slots of that chunk; the inclusive sum at an expert's last
//    chunk is its end.
__global__ void __launch_bounds__(SCAN_THREADS)
scan_kernel(int* counts, int* offsets, int num_experts, int chunks) {
    __shared__ int wave_sums[SCAN_THREADS / SMALLEST_WAVE];
    const int lane = threadIdx.x % LANES, wave = threadIdx.x / LANES, entries = num_experts * chunks;
    int carry = 0;
    for (int base = 0; base < entries; base += SCAN_THREADS) {
        const int i = base + threadIdx.x;
        const int count = i < entries ? counts[i] : 0;
        int sum = count;
        for (int step = 1; step < LANES; step *= 2) {
            const int below = SHUFFLE(sum, lane < step ? lane : lane - step);
            if (lane >= step) sum += below;
        }
        if (lane == LANES - 1) wave_sums[wave] = sum;
        __syncthreads();
        sum += carry;
        for (int w = 0; w < SCAN_THREADS / LANES; ++w) {
            if (w < wave) sum += wave_sums[w];
            carry += wave_sums[w];
        }
        if (i < entries) counts[i] = sum - count;
        if (i < entries && (i + 1) % chunks == 0) offsets[i / chunks] = sum;
        __syncthreads();             // the next round overwrites wave_sums
    }
}

// 3. The row of every slot. Lanes that hold the same expert find each other by one ballot per bit of its
//    number; the waves of a block then take their rows one after another, which makes the order stable.
__global__ void __launch_bounds__(THREADS)
place_kernel(int64* positions, const int* starts, const int64* experts, int slots, int num_experts,
             int chunks) {
    __shared__ int next_row[MAX_EXPERTS];
    const int lane = threadIdx.x % LANES, wave = threadIdx.x / LANES;
    for (int e = threadIdx.x; e < num_experts; e += THREADS) next_row[e] = starts[e * chunks + blockIdx.x];
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const int slot = blockIdx.x * CHUNK + i;
        const int expert = slot < slots && experts[slot] < num_experts ? (int)experts[slot] : num_experts;
        unsigned long long same = BALLOT(true);
        for (int bit = 1; bit <= num_experts; bit *= 2) {
            const unsigned long long ones = BALLOT((expert & bit) != 0);
            same &= expert & bit ? ones : ~ones;
        }
        const int rank = POPCOUNT(same & ((1ull << lane) - 1)), leader = POPCOUNT((same & -same) - 1);
        for (int turn = 0; turn < THREADS / LANES; ++turn) {
            if (wave == turn) {
                int first = 0;
                if (rank == 0 && expert < num_experts) {
                    first = next_row[expert];
                    next_row[expert] = first + POPCOUNT(same);
                }
                first = SHUFFLE(first, leader);
                if (slot < slots) positions[slot] = expert < num_experts ? first + rank : -1;
            }
            __syncthreads();         // the next wave's turn
        }
    }
}

struct bf16 { unsigned short bits; };
static __device__ inline float to_float(float f) { return f; }
static __device__ inline float to_float(bf16 b) {
    union { unsigned u; float f; } word = {(unsigned)b.bits << 16};
    return word.f;
}
static __device__ inline void from_float(float& to, float f) { to = f; }
static __device__ inline void from_float(bf16& to, float f) {
    union { float f; unsigned u; } word = {f};
    const unsigned rounded = word.u + 0x7fffu + (word.u >> 16 & 1u);      // to nearest, ties to even
    to.bits = (unsigned short)(f == f ? rounded >> 16 : 0x7fc0u);
}

// V elements that a lane moves at once: 16 bytes, or one element where a row cannot be cut into 16 bytes.
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T v[V]; };

// The row kernels: one wave a token. `width` is a row's length in packs.
#define ROW_KERNEL template <typename T, int V> __global__ void __launch_bounds__(THREADS)
#define MY_TOKEN ((int)blockIdx.x * (THREADS / LANES) + (int)threadIdx.x / LANES)
#define MY_LANE ((int)threadIdx.x % LANES)

// 4. Dispatch: a token's row is copied to each of its K places.
ROW_KERNEL
dispatch_kernel(void* rows_, const void* x_, const int64* positions, int tokens, int top_k, int width) {
    typedef Pack<T, V> P;
    const int token = MY_TOKEN;
    if (token >= tokens) return;
    const P* __restrict__ x = (const P*)x_ + (int64)token * width;
    for (int slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
        if (positions[slot] < 0) continue;
        P* __restrict__ row = (P*)rows_ + positions[slot] * width;
        #pragma unroll 4
        for (int i = MY_LANE; i < width; i += LANES) row[i] = x[i];
    }
}

// 5. Combine, summing in float32 in the order of k. Without weights it is the backward of dispatch; without
//    rows, the gradient of the skipped tokens' x.
ROW_KERNEL
combine_kernel(void* y_, const void* rows_, const float* weights, const int64* positions, const void* x_,
               int tokens, int top_k, int width) {
    typedef Pack<T, V> P;
    const int token = MY_TOKEN;
    if (token >= tokens) return;
    for (int base = MY_LANE; base < width; base += TILE * LANES) {
        float sum[TILE][V] = {};
        for (int slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
            const int64 position = positions[slot];
            const void* source = position < 0 ? x_ : rows_;
            if (!source) continue;
            const P* __restrict__ row = (const P*)source + (position < 0 ? token : position) * width;
            const float weight = weights ? weights[slot] : 1.0f;
            P pack[TILE];
            #pragma unroll
            for (int t = 0; t < TILE; ++t) {
                const int i = base + t * LANES;    // past the end the last pack is read, in vain: without a
                pack[t] = row[i < width ? i : width - 1];      // branch all loads start before any is awaited
            }
            #pragma unroll
            for (int t = 0; t < TILE; ++t)
                for (int j = 0; j < V; ++j) sum[t][j] += weight * to_float(pack[t].v[j]);
        }
        #pragma unroll
        for (int t = 0; t < TILE; ++t) {
            P pack;
            for (int j = 0; j < V; ++j) from_float(pack.v[j], sum[t][j]);
            if (base + t * LANES < width) ((P*)y_)[(int64)token * width + base + t * LANES] = pack;
        }
    }
}

// 6. Backward of combine: grad_rows[position] = weight * grad, grad_weight = rows[position] . grad (x . grad
//    where skipped). A skipped slot also clears one row of the tail; which one does not matter, for all of
//    them end as zeros, so an atomic on an integer may hand them out.
ROW_KERNEL
combine_backward_kernel(void* grad_rows_, float* grad_weights, int* cleared, const void* grad_,
                        const void* rows_, const float* weights, const int64* positions, const void* x_,
                        int tokens, int top_k, int width) {
    typedef Pack<T, V> P;
    const int token = MY_TOKEN, lane = MY_LANE;
    if (token >= tokens) return;
    const P* __restrict__ grad = (const P*)grad_ + (int64)token * width;
    for (int slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
        const float weight = weights[slot];
        const int64 position = positions[slot];
        int64 target = position;
        if (position < 0) {
            int tail = 0;
            if (lane == 0) tail = atomicAdd(cleared, 1);
            target = (int64)tokens * top_k - 1 - SHUFFLE(tail, 0);
        }
        const void* source = position < 0 ? x_ : rows_;
        const P* __restrict__ row = (const P*)source + (position < 0 ? token : position) * width;
        P* __restrict__ grad_row = (P*)grad_rows_ + target * width;
        float dot = 0;
        for (int i = lane; i < width; i += LANES) {
            const P g = grad[i];
            P r = {}, out;
            if (source) r = row[i];
            for (int j = 0; j < V; ++j) {
                if (source) dot += to_float(r.v[j]) * to_float(g.v[j]);
                from_float(out.v[j], position < 0 ? 0.0f : weight * to_float(g.v[j]));
            }
            grad_row[i] = out;
        }
        for (int step = LANES / 2; step > 0; step /= 2) dot += SHUFFLE(dot, lane ^ step);
        if (lane == 0) grad_weights[slot] = dot;
    }
}

// 7. The elementwise middle of an expert, one wave a row of h = [gate, up]: silu(gate) * up, or, where `grad`
//    is given, the gradients of gate and up.
ROW_KERNEL
swiglu_kernel(void* out_, const void* h_, const void* grad_, int rows, int width) {
    typedef Pack<T, V> P;
    const int row = MY_TOKEN;
    if (row >= rows) return;
    const P* __restrict__ gate = (const P*)h_ + (int64)row * 2 * width;
    const P* __restrict__ grad = (const P*)grad_ + (int64)row * width;
    P* __restrict__ out = (P*)out_ + (int64)row * (grad_ ? 2 : 1) * width;
    for (int i = MY_LANE; i < width; i += LANES) {
        const P g = gate[i], u = gate[width + i];
        P slope = {}, first, second;
        if (grad_) slope = grad[i];
        for (int j = 0; j < V; ++j) {
            const float f = to_float(g.v[j]), up = to_float(u.v[j]), d = to_float(slope.v[j]);
            const float s = 1.0f / (1.0f + expf(-f));
            from_float(first.v[j], grad_ ? d * up * s * (1.0f + f * (1.0f - s)) : f * s * up);
            from_float(second.v[j], d * f * s);
        }
        out[i] = first;
        if (grad_) out[width + i] = second;
    }
}
"""

LAUNCHERS = r"""
#define ROW_ARGUMENTS int tokens, int width, int type, int wide, int blocks, void* stream
#define BY_TYPE(kernel, ...)                                            \
    if (type == 0 && wide) LAUNCH((kernel<float, 4>), __VA_ARGS__);     \
    else if (type == 0) LAUNCH((kernel<float, 1>), __VA_ARGS__);        \
    else if (type == 1 && wide) LAUNCH((kernel<fp16, 8>), __VA_ARGS__); \
    else if (type == 1) LAUNCH((kernel<fp16, 1>), __VA_ARGS__);         \
    else if (wide) LAUNCH((kernel<bf16, 8>), __VA_ARGS__);              \
    else LAUNCH((kernel<bf16, 1>), __VA_ARGS__);                        \
    return LAST_ERROR()

extern "C" int launch_route(int64* positions, int* offsets, int* counts, const int64* experts, int slots,
                            int num_experts, int chunks, void* stream) {
    LAUNCH(count_kernel, chunks, THREADS, stream, counts, experts, slots, num_experts, chunks);
    LAUNCH(scan_kernel, 1, SCAN_THREADS, stream, counts, offsets, num_experts, chunks);
    LAUNCH(place_kernel, chunks, THREADS, stream, positions, counts, experts, slots, num_experts, chunks);
    return LAST_ERROR();
}
extern "C" int launch_dispatch(void* rows, const void* x, const int64* positions, int top_k, ROW_ARGUMENTS) {
    BY_TYPE(dispatch_kernel, blocks, THREADS, stream, rows, x, positions, tokens, top_k, width);
}
extern "C" int launch_combine(void* y, const void* rows, const float* weights, const int64* positions,
                              const void* x, int top_k, ROW_ARGUMENTS) {
    BY_TYPE(combine_kernel, blocks, THREADS, stream, y, rows, weights, positions, x, tokens, top_k, width);
}
extern "C" int launch_combine_backward(void* grad_rows, float* grad_weights, int* cleared, const void* grad,
                                       const void* rows, const float* weights, const int64* positions,
                                       const void* x, int top_k, ROW_ARGUMENTS) {
    BY_TYPE(combine_backward_kernel, blocks, THREADS, stream, grad_rows, grad_weights, cleared, grad, rows,
            weights, positions, x, tokens, top_k, width);
}
extern "C" int launch_swiglu(void* out, const void* h, const void* grad, ROW_ARGUMENTS) {
    BY_TYPE(swiglu_kernel, blocks, THREADS, stream, out, h, grad, tokens, width);
}
"""

# ----------------------------------------------------------------------------------- choosing the path

PATHS = ("auto", "hip", "plain", "shim")
CHUNK, MAX_EXPERTS = 1024, 1024                                 # as in KERNELS
_chosen, _resolved = "auto", {}


def select(path="auto", **shim):
    """Choose the path: "auto" (kernels where a GPU and a compiler are), "hip" (demanded), "plain", or "shim"
    (the kernels on the CPU, to test and learn; takes load_shim's arguments, and kernels: another source).
    ValueError if it cannot run."""
    global _chosen
    if path not in PATHS:
        raise ValueError(f"--kernels {path}: choose one of {', '.join(PATHS)}")
    _resolved.pop("shim", None)
    library, reason = _resolve(path, **shim)
    if library is None and path in ("hip", "shim"):
        raise ValueError(f"--kernels {path} cannot run: {reason}; mend that or use --kernels auto")
    _chosen = path


def status():
    """One line: which path runs and why. Builds the kernels if they are wanted and not built yet."""
    library, reason = _resolve(_chosen)
    return f"kernels: {library.name}" if library else f"kernels: plain torch operations ({reason})"


def _resolve(path, **shim):
    """(library, None) or (None, the reason in one line), found out once for each path."""
    if path == "plain":
        return None, "chosen"
    name = "shim" if path == "shim" else "gpu"
    if name not in _resolved:
        try:
            if name == "gpu":
                _resolved[name] = load_gpu([PRELUDE, KERNELS, LAUNCHERS]), None
            else:
                _resolved[name] = load_shim(shim.pop("kernels", KERNELS) + LAUNCHERS, **shim), None
        except Exception as error:              # whatever stands in the way, the plain path still works
            lines = [line.strip() for line in f"{error}".splitlines() if line.strip()] or [repr(error)]
            _resolved[name] = None, next((line for line in lines if "error:" in line), lines[0])[:200]
    return _resolved[name]


def _library_for(x, num_experts=1):
    """The library that serves this tensor, or None: plain. ValueError where kernels were demanded."""
    library, reason = _resolve(_chosen)
    if library is not None:
        if x.device.type != library.device:
            reason = f"the tensor is on {x.device}"
        elif x.dtype not in TYPES or num_experts > MAX_EXPERTS:
            reason = f"no kernel for {x.dtype} and {num_experts} experts"
        else:
            return library
    if _chosen in ("hip", "shim"):
        raise ValueError(f"--kernels {_chosen}: {reason}; use --kernels auto")
    return None


# ---------------------------------------------------------------------------------- kernels on tensors


def _dispatch_hip(library, x_ND, experts_NK, num_experts):
    (tokens, width), slots = x_ND.shape, experts_NK.numel()
    rows, positions = x_ND.new_empty(slots, width), torch.empty_like(experts_NK)
    offsets = torch.zeros(num_experts, dtype=torch.int32, device=x_ND.device)
    chunks = -(-slots // CHUNK)
    if slots:
        counts = offsets.new_empty(num_experts * chunks)
        library.call("launch_route", positions, offsets, counts, experts_NK, slots, num_experts, chunks)
    library.call_rows("launch_dispatch", rows, x_ND, positions, experts_NK.shape[1], rows=(rows, x_ND),
                      tokens=tokens, width=width)
    return rows, offsets, positions


def _combine_hip(library, rows, weights_NK, positions, x_ND=None):
    source = x_ND if rows is None else rows
    (tokens, top_k), width = positions.shape, source.shape[1]
    y_ND = source.new_empty(tokens, width)
    library.call_rows("launch_combine", y_ND, rows, weights_NK, positions, x_ND, top_k,
                      rows=(y_ND, rows, x_ND), tokens=tokens, width=width)
    return y_ND


def _combine_backward_hip(library, grad_ND, rows, weights_NK, positions, x_ND):
    (tokens, top_k), width = positions.shape, rows.shape[1]
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights_NK)
    cleared = torch.zeros(1, dtype=torch.int32, device=rows.device)
    library.call_rows("launch_combine_backward", grad_rows, grad_weights, cleared, grad_ND, rows, weights_NK,
                      positions, x_ND, top_k, rows=(grad_rows, grad_ND, rows, x_ND), tokens=tokens,
                      width=width)
    grad_x = None if x_ND is None else _combine_hip(library, None, weights_NK, positions, grad_ND)
    return grad_rows, grad_weights, grad_x


def _swiglu_hip(library, h, grad=None):
    out = h.new_empty(h.shape[0], h.shape[1] // 2) if grad is None else torch.empty_like(h)
    width = h.shape[1] // 2
    library.call_rows("launch_swiglu", out, h, grad, rows=(out, h, grad), tokens=len(h), width=width)
    return out


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, experts_NK, num_experts):
        ctx.library = _library_for(x_ND, num_experts)
        if ctx.library is None:
            rows, offsets, positions = dispatch_ref(x_ND, experts_NK, num_experts)
        else:
            rows, offsets, positions = _dispatch_hip(ctx.library, x_ND, experts_NK, num_experts)
        ctx.save_for_backward(positions)
        ctx.mark_non_differentiable(offsets, positions)
        return rows, offsets, positions

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, _offsets, _positions):
        positions, = ctx.saved_tensors
        if ctx.library is None:
            return combine_ref(grad_rows, None, positions), None, None
        return _combine_hip(ctx.library, grad_rows.contiguous(), None, positions), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights_NK, positions, x_ND):
        ctx.library = _library_for(rows)
        ctx.save_for_backward(rows, weights_NK, positions, x_ND)
        if ctx.library is None:
            return combine_ref(rows, weights_NK, positions, x_ND)
        return _combine_hip(ctx.library, rows, weights_NK, positions, x_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ND):
        rows, weights_NK, positions, x_ND = ctx.saved_tensors
        grad_ND = grad_ND.contiguous()
        if ctx.library is None:
            grads = combine_backward_ref(grad_ND, rows, weights_NK, positions, x_ND)
        else:
            grads = _combine_backward_hip(ctx.library, grad_ND, rows, weights_NK, positions, x_ND)
        return grads[0], grads[1], None, grads[2]


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, library):
        ctx.library = library
        ctx.save_for_backward(h)
        return _swiglu_hip(library, h)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _swiglu_hip(ctx.library, *ctx.saved_tensors, grad.contiguous()), None


def _eager(function):
    """A compiler cannot trace calls of kernels and has to leave them out; plain operations it may have."""
    @functools.wraps(function)
    def call(x, *args, **kwargs):
        if torch.compiler.is_compiling() and _library_for(x) is not None:
            return torch.compiler.disable(function)(x, *args, **kwargs)
        return function(x, *args, **kwargs)
    return call


@_eager
def dispatch(x_ND, experts_NK, num_experts):
    """Copy every token's row to its experts -> rows (N*K, D), offsets (E,) int32, positions (N, K) int64.

    experts_NK (N, K) int64 in [0, num_experts]; num_experts = skipped. rows: those of expert 0, of expert 1,
    ..., stable by slot n*K + k; after offsets[-1] follows one row of unspecified content per skipped slot.
    offsets: inclusive ends, as torch.nn.functional.grouped_mm wants them. positions: the row of each slot, -1
    where skipped. ValueError on another shape or dtype of experts_NK.
    """
    if experts_NK.dim() != 2 or experts_NK.dtype != torch.int64 or len(experts_NK) != len(x_ND):
        raise ValueError(f"dispatch: experts_NK must be int64 of shape ({len(x_ND)}, K), got "
                         f"{experts_NK.dtype} of shape {tuple(experts_NK.shape)}")
    return _Dispatch.apply(x_ND.contiguous(), experts_NK.contiguous(), num_experts)


@_eager
def combine(rows, weights_NK, positions, x_ND=None):
    """Each token's rows times their weights, summed in float32 or wider -> y_ND (N, D) of rows' dtype.

    rows (N*K, D) and positions (N, K) as from `dispatch`, weights_NK (N, K). A skipped slot adds weight *
    x_ND[n] where x_ND (N, D) is given (the skip expert is the identity), else nothing. Rows past the last
    expert's end are never used. ValueError where the shapes do not belong together.
    """
    if weights_NK.shape != positions.shape or len(rows) != positions.numel():
        raise ValueError(f"combine: weights {tuple(weights_NK.shape)}, positions {tuple(positions.shape)} "
                         f"and {len(rows)} rows do not belong together")
    if _library_for(rows) is not None:
        weights_NK = weights_NK.float()
    return _Combine.apply(rows.contiguous(), weights_NK.contiguous(), positions.contiguous(),
                          None if x_ND is None else x_ND.to(rows.dtype).contiguous())


def swiglu(h):
    """silu(gate) * up of h = [gate, up]: h (rows, 2F) -> (rows, F)."""
    library = None if torch.compiler.is_compiling() else _library_for(h)    # a compiler fuses this by itself
    return swiglu_ref(h) if library is None else _Swiglu.apply(h.contiguous(), library)


# --------------------------------------------------------------------------------------- demonstration


SIZES = (1, 1, 2, 4), (257, 1, 16, 40), (130, 3, 5, 33), (1030, 1, 600, 8)  # tokens, top-k, experts, width


def check(device="cpu"):
    """Every kernel, forward and backward, against its twin at several sizes -> the largest difference.

    ValueError, naming tensor, error and size, at the first that differs.
    """
    worst = 0.0
    paths = (dispatch, combine, swiglu), (dispatch_ref, combine_ref, swiglu_ref)
    for tokens, top_k, num_experts, width in SIZES:
        random = torch.Generator().manual_seed(tokens)
        x, grad = torch.randn(2, tokens, width, generator=random).to(device)
        weights = torch.rand(tokens, top_k, generator=random).to(device)
        experts = torch.randint(num_experts + 1, (tokens, top_k), generator=random).to(device)
        results = []
        for path_dispatch, path_combine, path_swiglu in paths:
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            rows, offsets, positions = path_dispatch(leaves[0], experts, num_experts)
            h = torch.cat([rows, rows.flip(1)], 1)[:max(int(offsets[-1]), 1)]
            out = F.pad(path_swiglu(h), (0, 0, 0, len(rows) - len(h)))
            y = path_combine(out, leaves[1], positions, leaves[0])
            results.append((offsets, positions, y, *torch.autograd.grad(y, leaves, grad)))
        for name, ours, twin in zip(("offsets", "positions", "y", "grad of x", "grad of weights"), *results):
            error = (ours.double() - twin.double()).abs().max().item()
            worst = max(worst, error)
            if not error <= 1e-5 * max(1, twin.abs().max().item()):
                raise ValueError(f"{name} differs by {error:.1e} at {tokens} tokens, {num_experts} experts")
    return worst


def main():
    print(status())
    chosen = _chosen
    select("plain")
    print("\n1. Seven tokens, three experts, through the plain path:")
    experts = torch.tensor([2, 0, 3, 2, 0, 1, 2])[:, None]
    x, p = torch.arange(7.0)[:, None] + torch.zeros(7, 4), torch.full((7, 1), 0.5)
    rows, offsets, positions = dispatch(x, experts, num_experts=3)
    print(f"   expert of each token  {experts.flatten().tolist()}      (3 is the skip class)")
    print(f"   row of each token     {positions.flatten().tolist()}     (-1: skipped)")
    print(f"   token in each row     {rows[:6, 0].int().tolist()}         experts end at {offsets.tolist()}")
    print(f"   combined, experts times 10 and p = 0.5: {combine(rows * 10, p, positions, x)[:, 0].tolist()}")
    print("\n2. Every kernel against its twin, forward and backward:")
    if torch.cuda.is_available():
        select("hip")
        print(f"   {status()}: largest difference {check('cuda'):.1e}")
    for lanes, schedule in ((64, "forward"), (64, "reverse"), (32, "forward"), (32, "random")):
        select("shim", lanes=lanes, schedule=schedule)
        print(f"   the source on the CPU, {lanes} lanes, {schedule} order: largest difference {check():.1e}")
    select(chosen)
    print("\n3. Bytes and speed (timings of the CPU shim mean nothing, so none are shown):")
    from benchmarks import kernels
    kernels.main()


if __name__ == "__main__":
    main()
