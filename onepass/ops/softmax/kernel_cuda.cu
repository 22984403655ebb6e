// softmax of long rows on sm_90a: a cluster of blocks keeps one row in its registers, so that the row is read once and
// written once. The Triton kernels read it twice, and from a batch of 256 rows of 128256 float32 on, the second time
// from memory.
//
// Each thread loads 32 elements and takes their maximum and their sum of exponentials about it. A warp puts its lanes
// together and leaves the pair in the shared memory of every block of the cluster (distributed shared memory); after
// one cluster barrier every warp merges all pairs by itself. A thread's exponentials are then multiplied by one number.
//
// Which elements a warp holds, and the order in which pairs are merged, depend on ALL_THREADS = CLUSTER * THREADS
// alone: two shapes of the cluster with the same product give the same bits.
//
// Bytes a row: N elements in, N out. About 7 instructions an element, one of them ex2. On an H200, 128256 float32: 3.3 µs
// for one row, 21.0 for 64, 71.9 for 256 (a copy: 2.0, 17.3, 63.3). With 16 elements a thread and twice the threads
// 256 rows take 82.3; stores that stay in the L2 cost up to 3 % of a batch.
//
// Specialised by macros: N (whole vectors of 16 bytes), ELEMENT, CLUSTER, THREADS, GREEDY, PER_ROW.

typedef unsigned int u32;

enum { FLOAT32, BFLOAT16, FLOAT16 };

constexpr int WARPS = THREADS / 32;
constexpr int ALL_WARPS = CLUSTER * WARPS;
constexpr int ALL_THREADS = CLUSTER * THREADS;
constexpr int WIDTH = ELEMENT == FLOAT32 ? 4 : 8;  // elements of a vector
constexpr int ROW_VECTORS = N / WIDTH;
constexpr int VECTORS = (ROW_VECTORS + ALL_THREADS - 1) / ALL_THREADS;  // of a thread, the last one perhaps past the row
constexpr int ELEMENTS = VECTORS * WIDTH;
static_assert(N % WIDTH == 0 && ELEMENTS <= 32, "a row of whole vectors, 32 elements a thread");

constexpr u32 NO_COLUMN = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float MIN_FLOAT32 = 0x1p-126f, MAX_FLOAT32 = 0x1.fffffep127f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float nan() { return __int_as_float(0x7fc00000); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// As softmax_triton.py: in the normal numbers, NaN for a temperature that is negative, infinite or NaN.
__device__ __forceinline__ float scale_of(float temperature) {
    if (!(temperature >= 0.0f && temperature < infinity())) return nan();
    return fminf(fmaxf(LOG2_E / temperature, MIN_FLOAT32), MAX_FLOAT32);
}

__device__ __forceinline__ uint4 load(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ float2 widen(u32 pair) {
    if (ELEMENT == BFLOAT16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    float2 both;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(both.x), "=f"(both.y) : "r"(pair));
    return both;
}

__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 pair;
    if (ELEMENT == BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    if (ELEMENT == FLOAT16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ void unpack(uint4 packed, float* x) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (ELEMENT == FLOAT32) {
            x[i] = __uint_as_float(words[i]);
        } else {
            float2 both = widen(words[i]);
            x[2 * i] = both.x;
            x[2 * i + 1] = both.y;
        }
    }
}

__device__ __forceinline__ uint4 pack(const float* y) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        words[i] = ELEMENT == FLOAT32 ? __float_as_uint(y[i]) : narrow(y[2 * i], y[2 * i + 1]);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// fmaxf and its shuffles skip NaN: the sum has it.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// What a warp found: its maximum, its sum about that, and the first column of the maximum (where one asks for it).
struct Parts {
    float2 sums[ALL_WARPS];
    u32 firsts[GREEDY ? ALL_WARPS : 1];
};

extern "C" __global__ void __launch_bounds__(THREADS, THREADS >= 1024 ? 1 : 1024 / THREADS)
softmax_cluster_kernel(const unsigned char* x, const float* temperatures, unsigned char* y, long long stride_x_bytes,
                       long long stride_temperature, long long stride_y_bytes, float temperature) {
    __shared__ Parts parts;
    // Every block of the cluster must run before another one writes to its shared memory.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    const long long row = blockIdx.x / CLUSTER;
    const u32 rank = cluster_rank(), lane = threadIdx.x % 32, warp = rank * WARPS + threadIdx.x / 32;
    const u32 thread = rank * THREADS + threadIdx.x;
    const uint4* in = reinterpret_cast<const uint4*>(x + row * stride_x_bytes);
    if (PER_ROW) temperature = temperatures[row * stride_temperature];

    constexpr u32 LOWEST = ELEMENT == FLOAT32 ? 0xff800000u : ELEMENT == BFLOAT16 ? 0xff80ff80u : 0xfc00fc00u;
    uint4 packed[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        packed[v] = make_uint4(LOWEST, LOWEST, LOWEST, LOWEST);
        if ((v + 1) * ALL_THREADS <= ROW_VECTORS || v * ALL_THREADS + thread < ROW_VECTORS)
            packed[v] = load(in + v * ALL_THREADS + thread);
    }
    const bool cold = GREEDY && temperature == 0.0f;
    // A cold row's sum is taken at temperature 1: it shows whether the row is NaN.
    const float scale = scale_of(cold ? 1.0f : temperature);

    float e[ELEMENTS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) unpack(packed[v], e + v * WIDTH);
    float largest = e[0];
#pragma unroll
    for (int i = 1; i < ELEMENTS; ++i) largest = fmaxf(largest, e[i]);
    u32 first = NO_COLUMN;
    if (cold) {
#pragma unroll
        for (int i = ELEMENTS - 1; i >= 0; --i)
            if (e[i] == largest) first = i / WIDTH * ALL_THREADS * WIDTH + i % WIDTH;
        first = first == NO_COLUMN ? first : first + thread * WIDTH;
    }
    // -inf is centred on 0 and gives 0; +inf gives NaN.
    const float centre = largest == -infinity() ? 0.0f : largest;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        e[i] = exp2_fast((e[i] - centre) * scale);
        total += e[i];
    }

    const float warp_largest = warp_max(largest);
    const float warp_centre = warp_largest == -infinity() ? 0.0f : warp_largest;
    const float warp_total = warp_sum(total * exp2_fast((largest - warp_centre) * scale));
    if (GREEDY) first = __reduce_min_sync(0xffffffffu, largest == warp_largest ? first : NO_COLUMN);

    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (lane < CLUSTER) {
        u32 target;
        asm("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(target) : "r"((u32)__cvta_generic_to_shared(&parts.sums[warp])), "r"(lane));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(warp_largest), "f"(warp_total)
                     : "memory");
        if (GREEDY) {
            asm("mapa.shared::cluster.u32 %0, %1, %2;"
                : "=r"(target) : "r"((u32)__cvta_generic_to_shared(&parts.firsts[GREEDY ? warp : 0])), "r"(lane));
            asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(target), "r"(first) : "memory");
        }
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    // From here on a block reads its own memory only: others may end.

    constexpr int ROUNDS = (ALL_WARPS + 31) / 32;
    float2 sums[ROUNDS];
    float row_largest = -infinity();
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        sums[i] = make_float2(-infinity(), 0.0f);
        if (i * 32 + lane < ALL_WARPS) sums[i] = parts.sums[i * 32 + lane];
        row_largest = fmaxf(row_largest, sums[i].x);
    }
    row_largest = warp_max(row_largest);
    float row_total = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) row_total += sums[i].y * exp2_fast((sums[i].x - row_largest) * scale);
    row_total = warp_sum(row_total);
    // NaN where all of the row is -inf.
    const float factor = exp2_fast((largest - row_largest) * scale) / row_total;
    u32 row_first = NO_COLUMN;
    if (GREEDY) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            if (i * 32 + lane < ALL_WARPS && sums[i].x == row_largest)
                row_first = min(row_first, parts.firsts[GREEDY ? i * 32 + lane : 0]);
        row_first = __reduce_min_sync(0xffffffffu, row_first);
    }

    const u32 taken = row_first - thread * WIDTH;
    uint4* out = reinterpret_cast<uint4*>(y + row * stride_y_bytes);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        float results[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            results[i] = e[v * WIDTH + i] * factor;
            if (cold) results[i] = (taken == v * ALL_THREADS * WIDTH + i ? 1.0f : 0.0f) + 0.0f * row_total;
        }
        if ((v + 1) * ALL_THREADS <= ROW_VECTORS || v * ALL_THREADS + thread < ROW_VECTORS)
            __stcs(out + v * ALL_THREADS + thread, pack(results));
    }
}
