// What kernels need of the machine, on a card. emulate.h says the same for the host, thread by thread.
// No header is included: NVRTC and a driver are all that is needed.

#define DEVICE static __device__ __forceinline__

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// Rounded once each, never fused or approximated: a row's bits are those of the CPU's kernels.
DEVICE float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float add_(float a, float b) { return __fadd_rn(a, b); }
DEVICE float mul_(float a, float b) { return __fmul_rn(a, b); }
DEVICE float div_(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float root(float a) { return __fsqrt_rn(a); }
DEVICE int nearest(float a) { return __float2int_rn(a); }
DEVICE float real(int a) { return __int2float_rn(a); }
DEVICE float as_float(int bits) { return __int_as_float(bits); }
DEVICE int as_int(float a) { return __float_as_int(a); }

DEVICE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
DEVICE float swap(float value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
DEVICE int swap(int value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
DEVICE void together() { __syncwarp(); }
DEVICE void barrier() { __syncthreads(); }
