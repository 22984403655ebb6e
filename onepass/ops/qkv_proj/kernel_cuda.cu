// The QKV projection of up to 16 tokens on sm_90a, with everything around it in one launch: RMSNorm of x before it; bias,
// RoPE and the append to a paged cache after it. Bound by the weights, which cross the chip once.
//
// A tile is 16 output features of one head, the rows of an m16n8k16 tensor-core product whose columns are tokens. Its rows
// are chosen so that rows g and g + 8 are the two halves of a RoPE pair: both land in the same thread, and rotating them
// needs no exchange. A CTA has TILES tiles, one CTA a multiprocessor; its warps share the hidden dimension, so that a
// warp loads its weights straight into the registers of the product: a lane takes 16 consecutive bytes of a feature and
// the same 16 bytes of a token. That permutes the hidden dimension inside a product, the same way on both sides.
//
// x * norm_weight is rounded to bfloat16 once; the root mean square is gathered on the way and applied to the sums, so x
// is read once. A token's sums depend on the hidden size only, never on the other tokens.
//
// Bytes: the weights once, x once a CTA from the L2. Instructions: 2 * TILES * NT products and about 60 others for
// 2 * TILES 16-byte loads.
//
// Specialised by macros: HIDDEN (a multiple of 8), HEAD_DIM (of 16), ROTARY (of 16, or 0), INTERLEAVED, NUM_Q_HEADS,
// NUM_KV_HEADS, HAS_NORM, OFFSET (norm weights are w + offset), HAS_BIAS, HAS_CACHE, POSITION_BITS, TILES, NT (8 tokens
// each), WARPS, STAGES.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int HEADS = NUM_Q_HEADS + 2 * NUM_KV_HEADS;
constexpr int TILES_A_HEAD = HEAD_DIM / 16;
constexpr int ALL_TILES = HEADS * TILES_A_HEAD;
constexpr int K_BLOCKS = (HIDDEN + 31) / 32;
constexpr int BLOCKS_A_WARP = (K_BLOCKS + WARPS - 1) / WARPS;
constexpr int HALF = ROTARY / 2;
constexpr int ITEMS = TILES * NT * 64;  // pairs of results of a CTA
constexpr int ITEMS_A_THREAD = (ITEMS + WARPS * 32 - 1) / (WARPS * 32);

#if POSITION_BITS == 64
typedef i64 Position;
#else
typedef int Position;
#endif

__device__ __forceinline__ float widen_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float widen_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ uint4 load_weights(const u16* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The output features, counted inside the head, that rows g and g + 8 of a head's tile stand for.
struct Pair {
    int low, high;
    int angle;  // column of the cosine, or -1: not rotated
};

__device__ __forceinline__ Pair features(int head, int tile, int g) {
    bool rotated = ROTARY > 0 && head < NUM_Q_HEADS + NUM_KV_HEADS && tile * 16 < ROTARY;
    if (!rotated) return {tile * 16 + g, tile * 16 + g + 8, -1};
    int angle = tile * 8 + g;
    if (INTERLEAVED) return {2 * angle, 2 * angle + 1, angle};
    return {angle, angle + HALF, angle};
}

struct Stage {
    uint4 low[TILES], high[TILES], x[NT], norm;
};

// Strides are in elements.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) qkv_proj_kernel(
    const u16* x, const u16* __restrict__ w, const u16* __restrict__ bias, const u16* __restrict__ norm_weight,
    const float* __restrict__ cos_sin, const Position* positions, const i64* slots, u16* key_cache, u16* value_cache, u16* q, u16* k, u16* v, i64 num_tokens,
    i64 stride_x, i64 stride_w, i64 stride_cos_sin, i64 num_positions, i64 stride_q, i64 stride_q_head, i64 stride_k,
    i64 stride_k_head, i64 stride_v, i64 stride_v_head, i64 page_size, i64 num_slots, i64 key_stride_page,
    i64 key_stride_slot, i64 key_stride_head, i64 value_stride_page, i64 value_stride_slot, i64 value_stride_head,
    i64 stride_positions, i64 stride_slots, float eps, float offset) {
    extern __shared__ float shared[];
    float* partial = shared;                                 // [WARPS][TILES * NT * 4][32]
    float* squares = shared + WARPS * TILES * NT * 4 * 32;   // [WARPS][NT * 8]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_tile = blockIdx.x * TILES;

    const u16 *low[TILES], *high[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        int tile = min(first_tile + i, ALL_TILES - 1);  // past the end: computed again, not stored
        int head = tile / TILES_A_HEAD;
        Pair pair = features(head, tile % TILES_A_HEAD, g);
        low[i] = w + (i64)(head * HEAD_DIM + pair.low) * stride_w + 8 * t;
        high[i] = w + (i64)(head * HEAD_DIM + pair.high) * stride_w + 8 * t;
    }

    const int first_block = warp * BLOCKS_A_WARP;
    auto inside = [&](int block) {
        if (HIDDEN % 32 == 0 && K_BLOCKS % WARPS == 0) return block < first_block + BLOCKS_A_WARP;
        return block < first_block + BLOCKS_A_WARP && block * 32 + 8 * t < HIDDEN;
    };
    Stage stages[STAGES];
    auto load_w = [&](Stage& s, int block) {
        bool in = inside(block);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            s.low[i] = s.high[i] = make_uint4(0, 0, 0, 0);
            if (in) s.low[i] = load_weights(low[i] + block * 32);
            if (in) s.high[i] = load_weights(high[i] + block * 32);
        }
        if (HAS_NORM) {
            s.norm = make_uint4(0, 0, 0, 0);
            if (in) s.norm = *(const uint4*)(norm_weight + block * 32 + 8 * t);
        }
    };
    auto load_x = [&](Stage& s, int block) {
        bool in = inside(block);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            s.x[n] = make_uint4(0, 0, 0, 0);
            if (in && n * 8 + g < num_tokens) s.x[n] = *(const uint4*)(x + (n * 8 + g) * stride_x + block * 32 + 8 * t);
        }
    };

    // Weights on their way into the L2 while the kernel before this one ends. Registers must not take them yet: that
    // kernel may have written them.
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            if (inside(first_block + s)) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(low[i] + (first_block + s) * 32));
                asm volatile("prefetch.global.L2 [%0];" ::"l"(high[i] + (first_block + s) * 32));
            }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll
    for (int s = 0; s < STAGES; ++s) load_w(stages[s], first_block + s);
#pragma unroll
    for (int s = 0; s < STAGES; ++s) load_x(stages[s], first_block + s);

    // What the end of the kernel needs, on its way while the weights stream.
    float cosine[ITEMS_A_THREAD], sine[ITEMS_A_THREAD];
    i64 slot[ITEMS_A_THREAD];
#pragma unroll
    for (int n = 0; n < ITEMS_A_THREAD; ++n) {
        int item = n * WARPS * 32 + threadIdx.x;
        int l = item % 32, j = item / 32 % 2, nt = item / 64 % NT, i = item / 64 / NT;
        int tile = first_tile + i, head = tile / TILES_A_HEAD, token = nt * 8 + l % 4 * 2 + j;
        cosine[n] = 1.0f, sine[n] = 0.0f, slot[n] = -1;
        if (item >= ITEMS || tile >= ALL_TILES || token >= num_tokens) continue;
        Pair pair = features(head, tile % TILES_A_HEAD, l / 4);
        if (ROTARY > 0 && head < NUM_Q_HEADS + NUM_KV_HEADS) {
            i64 position = positions[token * stride_positions];
            if (position < 0 || position >= num_positions) {
                cosine[n] = __int_as_float(0x7fffffff);  // a row of NaN
            } else if (pair.angle >= 0) {
                cosine[n] = cos_sin[position * stride_cos_sin + pair.angle];
                sine[n] = cos_sin[position * stride_cos_sin + pair.angle + HALF];
            }
        }
        if (HAS_CACHE && head >= NUM_Q_HEADS) slot[n] = slots[token * stride_slots];
    }

    float sums[TILES][NT][4];
    float square[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        square[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[i][n][c] = 0.0f;
    }

    auto normed = [&](u32 value, u32 weight, float& total) {
        float a = widen_low(value), b = widen_high(value);
        total += a * a;
        total += b * b;
        return narrow(a * (OFFSET ? widen_low(weight) + offset : widen_low(weight)),
                      b * (OFFSET ? widen_high(weight) + offset : widen_high(weight)));
    };
    for (int base = 0; base < BLOCKS_A_WARP; base += STAGES) {
#pragma unroll
        for (int at = 0; at < STAGES; ++at) {
            Stage& s = stages[at];
            if (BLOCKS_A_WARP % STAGES == 0 || base + at < BLOCKS_A_WARP) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    uint4 b = s.x[n];
                    if (HAS_NORM) {
                        b.x = normed(b.x, s.norm.x, square[n]);
                        b.y = normed(b.y, s.norm.y, square[n]);
                        b.z = normed(b.z, s.norm.z, square[n]);
                        b.w = normed(b.w, s.norm.w, square[n]);
                    }
#pragma unroll
                    for (int i = 0; i < TILES; ++i) {
                        multiply(sums[i][n], s.low[i].x, s.high[i].x, s.low[i].y, s.high[i].y, b.x, b.y);
                        multiply(sums[i][n], s.low[i].z, s.high[i].z, s.low[i].w, s.high[i].w, b.z, b.w);
                    }
                }
            }
            if (base + at + STAGES < BLOCKS_A_WARP) {
                load_w(s, first_block + base + at + STAGES);
                load_x(s, first_block + base + at + STAGES);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                partial[((warp * TILES + i) * NT + n) * 128 + c * 32 + lane] = sums[i][n][c];
    if (HAS_NORM) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            square[n] += __shfl_xor_sync(~0u, square[n], 1);
            square[n] += __shfl_xor_sync(~0u, square[n], 2);
            if (t == 0) squares[warp * NT * 8 + n * 8 + g] = square[n];
        }
    }
    __syncthreads();

#pragma unroll
    for (int n = 0; n < ITEMS_A_THREAD; ++n) {
        int item = n * WARPS * 32 + threadIdx.x;
        int l = item % 32, j = item / 32 % 2, nt = item / 64 % NT, i = item / 64 / NT;
        int tile = first_tile + i, head = tile / TILES_A_HEAD, token = nt * 8 + l % 4 * 2 + j;
        if (item >= ITEMS || tile >= ALL_TILES || token >= num_tokens) continue;
        Pair pair = features(head, tile % TILES_A_HEAD, l / 4);
        float a = 0.0f, b = 0.0f, total = 0.0f;
#pragma unroll
        for (int from = 0; from < WARPS; ++from) {
            const float* sum = partial + ((from * TILES + i) * NT + nt) * 128 + l;
            a += sum[j * 32];
            b += sum[(j + 2) * 32];
            if (HAS_NORM) total += squares[from * NT * 8 + token];
        }
        if (HAS_NORM) {
            float mean = total * (1.0f / HIDDEN) + eps;
            bool small = mean < 0x1p-100f;  // rsqrt takes a subnormal number for zero
            float rstd = rsqrtf(small ? mean * 0x1p80f : mean) * (small ? 0x1p40f : 1.0f);
            a *= rstd, b *= rstd;
        }
        if (HAS_BIAS) {
            a += __uint_as_float((u32)bias[head * HEAD_DIM + pair.low] << 16);
            b += __uint_as_float((u32)bias[head * HEAD_DIM + pair.high] << 16);
        }
        if (ROTARY > 0 && head < NUM_Q_HEADS + NUM_KV_HEADS) {
            if (pair.angle >= 0) {
                float rotated = a * cosine[n] - b * sine[n];
                b = b * cosine[n] + a * sine[n];
                a = rotated;
            }
            if (isnan(cosine[n])) a = b = cosine[n];
        }
        u16 first = narrow(a), second = narrow(b);
        u16* out;
        if (head < NUM_Q_HEADS)
            out = q + token * stride_q + head * stride_q_head;
        else if (head < NUM_Q_HEADS + NUM_KV_HEADS)
            out = k + token * stride_k + (head - NUM_Q_HEADS) * stride_k_head;
        else
            out = v + token * stride_v + (head - NUM_Q_HEADS - NUM_KV_HEADS) * stride_v_head;
        out[pair.low] = first, out[pair.high] = second;
        if (HAS_CACHE && slot[n] >= 0 && slot[n] < num_slots) {
            i64 page = slot[n] / page_size, in_page = slot[n] - page * page_size;
            if (head < NUM_Q_HEADS + NUM_KV_HEADS)
                out = key_cache + page * key_stride_page + in_page * key_stride_slot +
                      (head - NUM_Q_HEADS) * key_stride_head;
            else
                out = value_cache + page * value_stride_page + in_page * value_stride_slot +
                      (head - NUM_Q_HEADS - NUM_KV_HEADS) * value_stride_head;
            out[pair.low] = first, out[pair.high] = second;
        }
    }
}
