// The machine of card.cuh on the host: every thread of a block is a fiber with a stack of its own, blocks run one after the other.
// Between two points of synchronisation threads run in an order drawn anew each time, so that a race shows as a changed result; a
// barrier that not all threads reach, and a read past the end of what a block shares, are errors instead of luck.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define DEVICE static inline
#define __shared__ static
#define __global__

typedef int8_t i8;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef long long i64;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct Dim { int x, y, z; };

namespace machine {

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    State state = READY;
    int lane_turn = 0;
    void *stack_pointer = nullptr;
    std::vector<char> stack;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
};

typedef void (*Kernel)(const i64 *, const i64 *);

static const int STACK = 96 << 10;
static Dim block_index;
static Dim thread_index;
static std::vector<Fiber> fibers;
static int current, threads;
static Kernel kernel;
static const i64 *kernel_args, *kernel_head;
static u32 draw_state;
static union { float f; int i; } slots[2][32][32];

static u32 draw() {
    draw_state ^= draw_state << 13;
    draw_state ^= draw_state >> 17;
    return draw_state ^= draw_state << 5;
}

#if defined(__x86_64__)
static void *scheduler_pointer;
extern "C" void localrun_switch(void **save, void *load);
asm(R"(
.text
.type localrun_switch, @function
localrun_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size localrun_switch, .-localrun_switch
)");
static void to_scheduler() { localrun_switch(&fibers[current].stack_pointer, scheduler_pointer); }
static void to_fiber(int i) { localrun_switch(&scheduler_pointer, fibers[i].stack_pointer); }
#else
static ucontext_t scheduler_context;
static void to_scheduler() { swapcontext(&fibers[current].context, &scheduler_context); }
static void to_fiber(int i) { swapcontext(&scheduler_context, &fibers[i].context); }
#endif

static void life() {
    kernel(kernel_args, kernel_head);
    fibers[current].state = DONE;
    to_scheduler();
    abort();
}

static void prepare(Fiber &fiber) {
    fiber.state = READY;
    fiber.lane_turn = 0;
    if (fiber.stack.empty()) fiber.stack.resize(STACK);
#if defined(__x86_64__)
    uintptr_t top = (reinterpret_cast<uintptr_t>(fiber.stack.data()) + STACK) & ~uintptr_t(15);
    void **words = reinterpret_cast<void **>(top) - 8;
    memset(words, 0, 64);
    words[6] = reinterpret_cast<void *>(life);
    fiber.stack_pointer = words;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, life, 0);
#endif
}

static void wait(State state) {
    fibers[current].state = state;
    to_scheduler();
}

static bool release(int from, int to, State waiting) {
    int there = 0, alive = 0;
    for (int i = from; i < to; i++) {
        alive += fibers[i].state != DONE;
        there += fibers[i].state == waiting;
    }
    if (!alive || there != alive) return false;
    // Whoever is gone can exchange nothing: a warp's exchange and a block's barrier are for all of its threads.
    if (alive != to - from) return false;
    for (int i = from; i < to; i++) fibers[i].state = READY;
    return true;
}

static bool run_block() {
    std::vector<int> ready;
    for (int i = 0; i < threads; i++) prepare(fibers[i]);
    while (true) {
        ready.clear();
        for (int i = 0; i < threads; i++)
            if (fibers[i].state == READY) ready.push_back(i);
        if (ready.empty()) {
            bool moved = false, all_done = true;
            for (int i = 0; i < threads; i++) all_done = all_done && fibers[i].state == DONE;
            if (all_done) return true;
            for (int w = 0; w < threads; w += 32) moved = release(w, w + 32 < threads ? w + 32 : threads, AT_WARP) || moved;
            if (!moved) moved = release(0, threads, AT_BLOCK);
            if (!moved) return false;
            continue;
        }
        for (size_t i = ready.size(); i > 1; i--) {
            size_t j = draw() % i;
            int kept = ready[i - 1];
            ready[i - 1] = ready[j];
            ready[j] = kept;
        }
        for (int i : ready) {
            current = i;
            thread_index.x = i;
            to_fiber(i);
        }
    }
}

}  // namespace machine

#define threadIdx machine::thread_index
#define blockIdx machine::block_index

// Runs a kernel over a grid; the blocks in an order drawn by `seed` (not 0). 0: done; 1: threads wait for others that never come.
extern "C" int localrun_launch(machine::Kernel kernel, int x, int y, int z, int threads, const i64 *args, const i64 *head, u32 seed) {
    machine::kernel = kernel;
    machine::kernel_args = args;
    machine::kernel_head = head;
    machine::draw_state = seed;
    machine::threads = threads;
    if ((int)machine::fibers.size() < threads) machine::fibers.resize(threads);
    int total = x * y * z;
    u32 step = 1, first = total ? machine::draw() % total : 0;
    for (u32 tried = 2 + machine::draw() % 97; tried < 200; tried++) {
        u32 a = tried, b = total;
        while (b) { u32 rest = a % b; a = b; b = rest; }
        if (a == 1) { step = tried; break; }
    }
    for (int i = 0; i < total; i++) {
        int number = (int)((first + (uint64_t)i * step) % total);
        machine::block_index = Dim{number % x, number / x % y, number / x / y};
        if (!machine::run_block()) return 1;
    }
    return 0;
}

DEVICE float fma_(float a, float b, float c) { return std::fmaf(a, b, c); }
DEVICE float add_(float a, float b) { return a + b; }
DEVICE float mul_(float a, float b) { return a * b; }
DEVICE float div_(float a, float b) { return a / b; }
DEVICE float root(float a) { return std::sqrt(a); }
DEVICE int nearest(float a) { return (int)std::nearbyintf(a); }
DEVICE float real(int a) { return (float)a; }
DEVICE float as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
DEVICE int as_int(float a) { int bits; memcpy(&bits, &a, 4); return bits; }

DEVICE float half_to_float(u16 bits) {
    u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return as_float((int)(sign | 0x7f800000u | fraction << 13));
    if (exponent) return as_float((int)(sign | (exponent + 112) << 23 | fraction << 13));
    float small = std::ldexp((float)fraction, -24);
    return sign ? -small : small;
}

DEVICE u16 float_to_half(float value) {
    u32 bits = (u32)as_int(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (u16)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (u16)(sign | 0x7c00);
    if (rest < 0x38800000) return (u16)(sign | (u32)std::nearbyintf(std::ldexp(as_float((int)rest), 24)));
    u32 rounded = rest + 0xfff + (rest >> 13 & 1);
    return (u16)(sign | ((rounded - 0x38000000) >> 13));
}

DEVICE int dot4(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(i8)(a >> 8 * i) * (int)(i8)(b >> 8 * i);
    return c;
}

DEVICE void together() { machine::wait(machine::AT_WARP); }
DEVICE void barrier() { machine::wait(machine::AT_BLOCK); }

DEVICE int swap(int value, int lanes) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int turn = machine::fibers[machine::current].lane_turn++ & 1;
    machine::slots[turn][warp][lane].i = value;
    together();
    return machine::slots[turn][warp][lane ^ lanes].i;
}

DEVICE float swap(float value, int lanes) { return as_float(swap(as_int(value), lanes)); }
