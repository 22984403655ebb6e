// The arithmetic of fixed_point.py, which says what it means. Macros C0 ... C6: the polynomial.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr int CODE_BITS = 24;
constexpr int CODE_END = 41 << CODE_BITS;

__device__ __forceinline__ int code_of(float x, float largest, float scale) {
    float octaves = __fmul_rn(__fsub_rn(largest, x), scale);
    int code = octaves < 41.0f ? (int)(octaves * 16777216.0f) : CODE_END;
    return x == largest ? 0 : code;
}

// No conversion between integers and floats, which the hardware does at an eighth of the speed: the bits of a float in
// [1, 2) are those of its fraction, and those of a power in [1/2, 1] count up from 1/2.
__device__ __forceinline__ u64 weight_of(int code) {
    float g = __uint_as_float(0x3f800000u | (u32)(code >> 1 & 0x7fffff)) - 1.5f;
    float power = fmaf(C6, g, C5);
    power = fmaf(power, g, C4);
    power = fmaf(power, g, C3);
    power = fmaf(power, g, C2);
    power = fmaf(power, g, C1);
    power = fmaf(power, g, C0);
    u64 mantissa = __float_as_uint(power) - 0x3e800000u;
    return (mantissa << 16) >> (code >> CODE_BITS);
}

// floor(total * min(fraction, 1)), the fraction cut to a multiple of 2^-30; NaN is 0.
__device__ __forceinline__ u64 times_fraction(u64 total, float fraction) {
    u64 parts = fraction > 0.0f ? (u64)(fminf(fraction, 1.0f) * 0x1p30f) : 0;
    return (((total >> 32) * parts) << 2) + (((total & 0xffffffffu) * parts) >> 30);
}

// floor(u * total), u of 64 random bits from Philox4x32-10.
__device__ __forceinline__ u64 random_part(u64 total, u64 seed, u64 row, u64 offset) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    u32 c0 = (u32)row, c1 = (u32)(row >> 32), c2 = (u32)offset, c3 = (u32)(offset >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u64 first = (u64)c0 * 0xD2511F53u, second = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(second >> 32) ^ c1 ^ k0;
        c2 = (u32)(first >> 32) ^ c3 ^ k1;
        c1 = (u32)second;
        c3 = (u32)first;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return __umul64hi(((u64)c0 << 32) | c1, total);
}
