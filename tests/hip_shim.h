// A GPU block on one CPU thread: the prelude that lets the kernels of kernels_hip.py run, unchanged, without
// GPU.
//
// Every GPU thread is a fiber with its own stack. A fiber runs until it needs others: at a barrier, or at a
// wave operation (ballot, shuffle), where all lanes of its wave must meet at the same line. Waves run as far
// as they can, in an order that the caller picks: forward, reverse or random. A kernel that needs a barrier
// it does not have gives wrong numbers in one of the three; a divergent shuffle or a barrier that not all
// threads reach is an error with its line. Shared memory is filled with rubbish before every block, so that
// reading it too early shows. Nothing here says anything about speed.
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define LANES shim_lanes
#define SMALLEST_WAVE 32
#define BALLOT(p) wave_ballot(p, __LINE__)
#define SHUFFLE(v, lane) wave_shuffle(v, lane, __LINE__)
#define POPCOUNT(m) __builtin_popcountll(m)
#define LAUNCH(kernel, blocks, threads, stream, ...) \
    (void)(stream), shim_launch(blocks, threads, [=] { kernel(__VA_ARGS__); })
#define LAST_ERROR() (shim_message[0] != 0)
#define __global__ static
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static __attribute__((section("shim_shared")))  // one section, to spoil as a whole
#define __syncthreads() shim_wait(AT_BARRIER, __LINE__)

typedef _Float16 fp16;
static inline float to_float(fp16 h) { return (float)h; }
static inline void from_float(fp16& h, float f) { h = (fp16)f; }

enum State { READY, AT_BARRIER, AT_WAVE, DONE };
struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool started;
    State state;
    int line, lane;                  // where it waits; which lane it wants to read
    unsigned long long value, seen;  // what it shows to its wave; the whole wave's answer
};
struct Index { int x; };
static Index threadIdx, blockIdx;
static int shim_lanes = 64, shim_schedule = 0;  // 0 forward, 1 reverse, 2 random
static unsigned shim_random = 1;
static char shim_message[200];
static std::vector<Fiber> fibers(1024);
static jmp_buf scheduler;
static std::function<void()> shim_body;
extern "C" char __start_shim_shared[], __stop_shim_shared[];

static void shim_wait(State state, int line) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.state = state, fiber.line = line;
    if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

static void shim_enter() {
    shim_body();
    shim_wait(DONE, 0);
}

template <typename V> static V wave_shuffle(V value, int lane, int line) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.value = 0, fiber.lane = lane;
    memcpy(&fiber.value, &value, sizeof value);
    shim_wait(AT_WAVE, line);
    memcpy(&value, &fiber.seen, sizeof value);
    return value;
}

static unsigned long long wave_ballot(bool vote, int line) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.value = vote, fiber.lane = -1;
    shim_wait(AT_WAVE, line);
    return fiber.seen;
}

static unsigned random_below(unsigned n) {
    shim_random = shim_random * 1664525u + 1013904223u;
    return shim_random / 65536u % n;
}
static int in_order(int i, int n) { return shim_schedule == 1 ? n - 1 - i : i; }
static int atomicAdd(int* where, int amount) { return (*where += amount) - amount; }

// Runs every ready lane of a wave once; true when the wave then met at a wave operation and may go on.
static bool run_wave(int first, int lanes) {
    int turn = shim_schedule == 2 ? random_below(lanes) : 0;
    for (int i = 0; i < lanes; ++i) {
        int me = first + (shim_schedule == 2 ? (i * 7 + turn) % lanes : in_order(i, lanes));
        if (fibers[me].state != READY) continue;
        threadIdx.x = me;
        if (_setjmp(scheduler)) continue;  // a fiber that stops comes back here
        if (fibers[me].started) _longjmp(fibers[me].at, 1);
        fibers[me].started = true;
        setcontext(&fibers[me].start);
    }
    int meeting = 0, line = 0;
    unsigned long long votes = 0;
    for (int i = 0; i < lanes; ++i) {
        Fiber& fiber = fibers[first + i];
        if (fiber.state == AT_WAVE) ++meeting, line = fiber.line, votes |= (fiber.value & 1) << i;
    }
    if (!meeting) return false;
    for (int i = 0; i < lanes; ++i) {
        Fiber& fiber = fibers[first + i];
        if (fiber.state != AT_WAVE || fiber.line != line || fiber.lane < -1 || fiber.lane >= lanes) {
            snprintf(shim_message, sizeof shim_message, "wave operation at line %d, not met by %d", line, i);
            return false;
        }
        fiber.seen = fiber.lane < 0 ? votes : fibers[first + fiber.lane].value;
    }
    for (int i = 0; i < lanes; ++i) fibers[first + i].state = READY;
    return true;
}

static void run_block(int threads) {
    const int waves = threads / shim_lanes;
    memset(__start_shim_shared, 0xA5, __stop_shim_shared - __start_shim_shared);
    for (int i = 0; i < threads; ++i) fibers[i].state = READY, fibers[i].started = false;
    while (!shim_message[0]) {
        int turn = shim_schedule == 2 ? random_below(waves) : 0, moving = shim_schedule == 2;
        while (moving && !shim_message[0]) {  // random: one step of one wave at a time
            moving = 0;
            for (int w = 0; w < waves; ++w)
                moving += run_wave((w * 7 + turn) % waves * shim_lanes, shim_lanes);
            turn = random_below(waves);
        }
        for (int w = 0; w < waves; ++w)
            while (!shim_message[0] && run_wave(in_order(w, waves) * shim_lanes, shim_lanes)) {}
        for (int i = 0; i < threads && !shim_message[0]; ++i)
            if (fibers[i].state != fibers[0].state || fibers[i].line != fibers[0].line)
                snprintf(shim_message, sizeof shim_message, "barrier at line %d not reached by all threads",
                         fibers[i].line > fibers[0].line ? fibers[i].line : fibers[0].line);
        if (fibers[0].state == DONE) return;
        for (int i = 0; i < threads; ++i) fibers[i].state = READY;
    }
}

static void make_fibers() {
    static std::vector<char> stacks(fibers.size() * 32768);
    for (size_t i = 0; i < fibers.size(); ++i) {
        getcontext(&fibers[i].start);
        fibers[i].start.uc_stack.ss_sp = &stacks[i * 32768];
        fibers[i].start.uc_stack.ss_size = 32768;
        fibers[i].start.uc_link = nullptr;
        makecontext(&fibers[i].start, shim_enter, 0);
    }
}

static void shim_launch(int blocks, int threads, std::function<void()> body) {
    static const bool once = (make_fibers(), true);
    shim_body = body;
    for (int b = 0; once && b < blocks && !shim_message[0]; ++b) {
        blockIdx.x = in_order(b, blocks);
        run_block(threads);
    }
}

extern "C" void shim_configure(int lanes, int schedule, int seed) {
    shim_lanes = lanes, shim_schedule = schedule, shim_random = seed, shim_message[0] = 0;
}
extern "C" const char* shim_error() { return shim_message; }
