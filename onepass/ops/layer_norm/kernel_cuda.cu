// LayerNorm and its activation for long rows of bfloat16 on sm_90a: a row stays in shared memory, so that it
// crosses the L2 once. Reading it from the L2 a second time, as the Triton kernel does, is what bounds that kernel: at
// N = 65536 a row then takes 4 x 128 KB from the L2 (x twice, weight, bias), and 73 % of a copy's speed is left.
//
// One CTA a multiprocessor. A producer thread walks the CTA's rows and keeps a ring of chunks filled by bulk copies; it
// never waits for arithmetic, only for free slots. 16 consumer warps read a row twice from the ring (statistics, then
// the result) and free its slots chunk by chunk in the second pass, while the next row is arriving behind it. The
// weight stays in registers for all rows, and so does the bias where it fits.
//
// A row whose weight and bias are too long for the registers of one multiprocessor is shared by a cluster of two CTAs. Every
// warp then sends its sums to both, so that they meet only once a row.
//
// Bytes a row: 2N in, 2N out; the bias 2N from the L2 where it is not in registers. Instructions: about 17 an element.
//
// Specialised by macros: N (a multiple of 8 CLUSTER), CLUSTER, HAS_WEIGHT, HAS_BIAS, ACTIVATION, SLOTS.

typedef unsigned int u32;
typedef unsigned long long u64;

enum { NONE, SILU, GELU, GELU_TANH, RELU };

constexpr int CONSUMERS = 512;
constexpr int THREADS = CONSUMERS + 128;  // registers move between groups of 4 warps, so the producer has one
// What the groups ask for must fit what the block was launched with, or the last one waits for ever.
constexpr int LAUNCH_REGISTERS = 96, CONSUMER_REGISTERS = 112, PRODUCER_REGISTERS = 24;
static_assert(CONSUMERS * CONSUMER_REGISTERS + 128 * PRODUCER_REGISTERS <= THREADS * LAUNCH_REGISTERS, "registers");
constexpr int WARPS = CONSUMERS / 32;
constexpr int CHUNK_BYTES = 16384;
constexpr int VECTORS_A_CHUNK = CHUNK_BYTES / 16 / CONSUMERS;  // a vector: 16 bytes, 8 elements
constexpr int COLUMNS = N / CLUSTER;  // of this CTA
constexpr int ROW_BYTES = 2 * COLUMNS;
constexpr int CHUNKS = (ROW_BYTES + CHUNK_BYTES - 1) / CHUNK_BYTES;
constexpr int VECTORS = CHUNKS * VECTORS_A_CHUNK;  // of a thread, the last ones perhaps past the row
// 4 registers a vector; erf needs some of its own.
constexpr bool WEIGHT_IN_REGISTERS = HAS_WEIGHT && VECTORS <= (ACTIVATION == GELU ? 12 : 16);
constexpr bool BIAS_IN_REGISTERS = HAS_BIAS && VECTORS <= 8;
static_assert(N % (8 * CLUSTER) == 0 && CHUNKS < SLOTS, "a row of whole vectors, and room for the next one");

struct Shared {
    // chunk slots first: bulk copies write to them
    unsigned char chunks[SLOTS][CHUNK_BYTES];
    u64 full[SLOTS];
    u64 empty[SLOTS];
    // Of two rows in turn: a warp writes one again only after the next row's sums have met, when all have read it.
    u64 met[2];
    float2 partial[2][CLUSTER][WARPS];
    float pivot[2][CLUSTER];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_load(void* target, const void* source, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(target)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// Two bfloat16 of one register as float32.
__device__ __forceinline__ float2 widen(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The sum 1 + exp is at least 1, so the approximate instructions lose nothing to subnormal numbers.
__device__ __forceinline__ float sigmoid(float x) {
    float y;
    asm("{ .reg .f32 t; mul.f32 t, %1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
        " rcp.approx.ftz.f32 %0, t; }" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float activate(float x) {
    if (ACTIVATION == SILU) return x * sigmoid(x);
    if (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (ACTIVATION == GELU_TANH) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    if (ACTIVATION == RELU) return x < 0.0f ? 0.0f : x;  // NaN goes through
    return x;
}

__device__ __forceinline__ float rstd_of(float variance, float eps) {
    // Rounding may leave a tiny negative variance for a constant row; NaN must stay NaN.
    float square = (variance < 0.0f ? 0.0f : variance) + eps;
    bool small = square < 0x1p-100f;  // rsqrt takes a subnormal number for zero
    return rsqrtf(small ? square * 0x1p80f : square) * (small ? 0x1p40f : 1.0f);
}

struct Moments {
    float offset, variance;  // the row's mean less this CTA's pivot
};

// Two numbers, or one, to the same place in the shared memory of a CTA of the cluster, with word to its barrier.
__device__ __forceinline__ u32 remote(const void* p, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}

__device__ __forceinline__ void send(float2* target, float a, float b, u64* barrier, u32 rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     remote(target, rank)), "f"(a), "f"(b), "r"(remote(barrier, rank)) : "memory");
}

__device__ __forceinline__ void send(float* target, float a, u64* barrier, u32 rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     remote(target, rank)), "f"(a), "r"(remote(barrier, rank)) : "memory");
}

// The row's mean and variance from every thread's sums about its CTA's pivot, added in the same order everywhere.
__device__ __forceinline__ Moments meet(Shared& s, u32 rank, u32 row, float pivot, float total, float squares) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, lanes);
        squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
    }
    u32 turn = row & 1, warp = threadIdx.x / 32;
    if (CLUSTER == 1) {
        if (threadIdx.x % 32 == 0) s.partial[turn][0][warp] = make_float2(total, squares);
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    } else {
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&s.met[turn])),
                         "n"(CLUSTER * (8 * WARPS + 4)) : "memory");
        if (threadIdx.x % 32 < CLUSTER) {
            u32 to = threadIdx.x % 32;
            send(&s.partial[turn][rank][warp], total, squares, &s.met[turn], to);
            if (warp == 0) send(&s.pivot[turn][rank], pivot, &s.met[turn], to);
        }
        barrier_wait(&s.met[turn], (row >> 1) & 1);
    }
    // All means are taken from the first pivot: where all elements are equal, every difference is exactly zero.
    float means[CLUSTER], mean = 0.0f, variance = 0.0f;
#pragma unroll
    for (int part = 0; part < CLUSTER; ++part) {
        total = squares = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float2 of_warp = s.partial[turn][part][w];
            total += of_warp.x;
            squares += of_warp.y;
        }
        float offset = total * (1.0f / COLUMNS);
        means[part] = CLUSTER == 1 ? offset : s.pivot[turn][part] - s.pivot[turn][0] + offset;
        mean += means[part] * (1.0f / CLUSTER);
        variance += (squares * (1.0f / COLUMNS) - offset * offset) * (1.0f / CLUSTER);
    }
    if (CLUSTER == 1) return {mean, variance};
#pragma unroll
    for (int part = 0; part < CLUSTER; ++part) variance += (means[part] - mean) * (means[part] - mean) * (1.0f / CLUSTER);
    return {mean - (s.pivot[turn][rank] - s.pivot[turn][0]), variance};
}

// The vectors of a thread in a chunk lie CONSUMERS apart, so that a warp's accesses are contiguous.
__device__ __forceinline__ int vector_in_row(int v) {
    return v * CONSUMERS + threadIdx.x;
}

__device__ __forceinline__ bool inside(int v) {
    return (v + 1) * CONSUMERS * 8 <= COLUMNS || vector_in_row(v) * 8 < COLUMNS;
}

__device__ void produce(Shared& s, const unsigned char* x, long long num_rows, long long stride_bytes) {
    u32 at = 0;
    for (long long row = blockIdx.x / CLUSTER; row < num_rows; row += gridDim.x / CLUSTER) {
        for (int chunk = 0; chunk < CHUNKS; ++chunk, ++at) {
            u32 slot = at % SLOTS, round = at / SLOTS;
            if (round > 0) barrier_wait(&s.empty[slot], (round - 1) & 1);
            u32 bytes = chunk < CHUNKS - 1 ? CHUNK_BYTES : ROW_BYTES - (CHUNKS - 1) * CHUNK_BYTES;
            bulk_load(s.chunks[slot], x + row * stride_bytes + blockIdx.x % CLUSTER * ROW_BYTES + chunk * CHUNK_BYTES, bytes, &s.full[slot]);
        }
    }
}

__device__ void consume(Shared& s, const uint4* weight, const uint4* bias, unsigned char* y, long long num_rows,
                        long long stride_bytes, float eps) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const u32 rank = blockIdx.x % CLUSTER;
    if (HAS_WEIGHT) weight += rank * (COLUMNS / 8);
    if (HAS_BIAS) bias += rank * (COLUMNS / 8);
    uint4 weights[WEIGHT_IN_REGISTERS ? VECTORS : 1], biases[BIAS_IN_REGISTERS ? VECTORS : 1];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (WEIGHT_IN_REGISTERS) weights[v] = inside(v) ? weight[vector_in_row(v)] : zero;
        if (BIAS_IN_REGISTERS) biases[v] = inside(v) ? bias[vector_in_row(v)] : zero;
    }

    u32 at = 0, row_count = 0;
    for (long long row = blockIdx.x / CLUSTER; row < num_rows; row += gridDim.x / CLUSTER, ++row_count) {
        // Statistics, centred on the mean of the row's first 8 elements. kernel_triton.py says what that costs: for
        // these N up to 6.7e-4 of the variance, too much for float16.
        float pivot = 0.0f, total = 0.0f, squares = 0.0f;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            u32 slot = (at + chunk) % SLOTS;
            barrier_wait(&s.full[slot], ((at + chunk) / SLOTS) & 1);
            const uint4* vectors = reinterpret_cast<const uint4*>(s.chunks[slot]);
            if (chunk == 0) {
                uint4 first = vectors[0];
                float2 a = widen(first.x), b = widen(first.y), c = widen(first.z), d = widen(first.w);
                pivot = (a.x * 0.125f + a.y * 0.125f + b.x * 0.125f + b.y * 0.125f) +
                        (c.x * 0.125f + c.y * 0.125f + d.x * 0.125f + d.y * 0.125f);
            }
#pragma unroll
            for (int k = 0; k < VECTORS_A_CHUNK; ++k) {
                int v = chunk * VECTORS_A_CHUNK + k;
                if (!inside(v)) continue;
                uint4 packed = vectors[k * CONSUMERS + threadIdx.x];
                const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float2 x = widen(pairs[i]);
                    float low = x.x - pivot, high = x.y - pivot;
                    total += low;
                    squares = fmaf(low, low, squares);
                    total += high;
                    squares = fmaf(high, high, squares);
                }
            }
        }
        Moments moments = meet(s, rank, row_count, pivot, total, squares);
        float rstd = rstd_of(moments.variance, eps);
        float shift = -moments.offset * rstd;

        uint4* out = reinterpret_cast<uint4*>(y + row * stride_bytes + rank * ROW_BYTES);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            u32 slot = (at + chunk) % SLOTS;
            const uint4* vectors = reinterpret_cast<const uint4*>(s.chunks[slot]);
            uint4 results[VECTORS_A_CHUNK];
#pragma unroll
            for (int k = 0; k < VECTORS_A_CHUNK; ++k) {
                int v = chunk * VECTORS_A_CHUNK + k;
                if (!inside(v)) continue;
                uint4 packed = vectors[k * CONSUMERS + threadIdx.x], w = zero, b = zero;
                if (HAS_WEIGHT) w = WEIGHT_IN_REGISTERS ? weights[WEIGHT_IN_REGISTERS ? v : 0] : weight[vector_in_row(v)];
                if (HAS_BIAS) b = BIAS_IN_REGISTERS ? biases[BIAS_IN_REGISTERS ? v : 0] : bias[vector_in_row(v)];
                const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
                const u32 ws[4] = {w.x, w.y, w.z, w.w}, bs[4] = {b.x, b.y, b.z, b.w};
                u32 done[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float2 x = widen(pairs[i]);
                    x.x = fmaf(x.x - pivot, rstd, shift);
                    x.y = fmaf(x.y - pivot, rstd, shift);
                    if (HAS_WEIGHT) {
                        float2 scale = widen(ws[i]);
                        x.x *= scale.x;
                        x.y *= scale.y;
                    }
                    if (HAS_BIAS) {
                        float2 add = widen(bs[i]);
                        x.x += add.x;
                        x.y += add.y;
                    }
                    done[i] = narrow(activate(x.x), activate(x.y));
                }
                results[k] = make_uint4(done[0], done[1], done[2], done[3]);
            }
            // The slot is read; the results are in registers.
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[slot]);
#pragma unroll
            for (int k = 0; k < VECTORS_A_CHUNK; ++k) {
                int v = chunk * VECTORS_A_CHUNK + k;
                if (inside(v)) out[vector_in_row(v)] = results[k];
            }
        }
        at += CHUNKS;
    }
}

// All threads of the cluster.
__device__ __forceinline__ void meet_all() {
    if (CLUSTER == 1) {
        __syncthreads();
    } else {
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
layer_norm_long_row_kernel(const unsigned char* x, const uint4* weight, const uint4* bias, unsigned char* y,
                           long long num_rows, long long stride_x_bytes, long long stride_y_bytes, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            barrier_init(&s.full[slot], 1);
            barrier_init(&s.empty[slot], WARPS);
        }
        barrier_init(&s.met[0], 1);
        barrier_init(&s.met[1], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_all();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == CONSUMERS) produce(s, x, num_rows, stride_x_bytes);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(s, weight, bias, y, num_rows, stride_y_bytes, eps);
    }
    if (CLUSTER > 1) meet_all();  // what is sent to a CTA must find it running
}
