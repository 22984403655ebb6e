// FlashAttention, forward, in half precision on sm_90a. The schedule is that of FlashAttention-3 (Shah et al., 2024).
//
// One CTA a multiprocessor walks tiles of 64 GROUPS queries of one head. Two producer threads load by TMA: one Q, once a
// tile, the other blocks of K and V into a ring. GROUPS warp groups own 64 queries each and keep scores, weights and the output in
// registers. Two overlaps hide the softmax: within a group, the scores of block j are multiplied while block j - 1 meets V;
// between groups, they take turns, so that one multiplies while the others take exponentials.
//
// Flops: 4 D for each pair of a query and a key that it sees, and those of masked pairs in the blocks on the edge.
// Specialised by macros: D (head_dim, a multiple of 8), BLOCK_N, GROUPS, STAGES, RIGHT_BOUND and LEFT_BOUND (keys are
// limited after and before the diagonal), SOFTCAP, VARLEN, WIDE_INDEX (cu_seqlens are int64), HALF_SINKS (sinks have q's
// dtype), BFLOAT16. Before this text stand instructions.cu, and wgmma_scores and
// wgmma_outputs, which the host writes for the shape.

constexpr int BLOCK_M = 64 * GROUPS;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int PANELS = (D + 63) / 64;  // of 64 columns, 128 bytes: what one swizzled row holds
constexpr int Q_BYTES = PANELS * BLOCK_M * 128;
constexpr int KV_BYTES = PANELS * BLOCK_N * 128;
// What the groups ask for must fit what the block was launched with, or the last one waits for ever.
constexpr int LAUNCH_REGISTERS = GROUPS == 3 ? 128 : 168, PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 232;
static_assert(128 * (GROUPS * CONSUMER_REGISTERS + PRODUCER_REGISTERS) <= THREADS * LAUNCH_REGISTERS, "registers");

struct Shared {
    unsigned char q[Q_BYTES];  // the output's way out, too
    unsigned char k[STAGES][KV_BYTES];
    unsigned char v[STAGES][KV_BYTES];
    u64 q_full[GROUPS], q_empty[GROUPS];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

#if WIDE_INDEX
typedef long long Index;
#else
typedef int Index;
#endif

#if HALF_SINKS
typedef unsigned short Sink;
__device__ __forceinline__ float widen(Sink x) {
#if BFLOAT16
    return __uint_as_float((u32)x << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}
#else
typedef float Sink;
__device__ __forceinline__ float widen(Sink x) { return x; }
#endif

struct Shape {
    int batch, heads, group, seqlen_q, seqlen_k, blocks_m, tiles;
    const Index *cu_q, *cu_k;  // VARLEN: where the sequences begin in the packed tensors, [batch + 1]
    long long total_q;
    int section;  // heads (of all sequences) whose K and V fit the L2 together
    int left, right;  // keys before and after the diagonal that a query sees
};

struct Tile {
    int m, head, batch;
    int seqlen_q, seqlen_k, first_q, first_k;  // of this sequence; first rows in the packed tensors
    int first_n, blocks_n;
    bool exists;  // its sequence reaches this far

    __device__ __forceinline__ int diagonal() const { return m * BLOCK_M + seqlen_k - seqlen_q; }
};

// One section of heads after the other; within it long tiles first, and heads that share K and V side by side.
__device__ __forceinline__ Tile tile_of(int index, const Shape& shape) {
    Tile t;
    int tiles_a_section = shape.section * shape.blocks_m;
    int section = index / tiles_a_section, column = section * shape.section;
    int columns = min(shape.section, shape.batch * shape.heads - column);
    index -= section * tiles_a_section;
    int m = index / columns;
    column += index - m * columns;
    t.batch = column / shape.heads;
    t.head = column - t.batch * shape.heads;
    t.m = RIGHT_BOUND ? shape.blocks_m - 1 - m : m;
    t.seqlen_q = shape.seqlen_q, t.seqlen_k = shape.seqlen_k;
    t.first_q = t.first_k = 0;
    if (VARLEN) {
        t.first_q = shape.cu_q[t.batch], t.first_k = shape.cu_k[t.batch];
        t.seqlen_q = shape.cu_q[t.batch + 1] - t.first_q, t.seqlen_k = shape.cu_k[t.batch + 1] - t.first_k;
    }
    t.exists = !VARLEN || t.m * BLOCK_M < t.seqlen_q;
    int first = 0, last = t.seqlen_k;
    if (RIGHT_BOUND) {
        if (LEFT_BOUND) first = max(0, t.diagonal() - shape.left);
        last = min(last, min(t.diagonal() + BLOCK_M, t.seqlen_k) + shape.right);
    }
    t.first_n = first / BLOCK_N;
    t.blocks_n = last > first ? (last + BLOCK_N - 1) / BLOCK_N - t.first_n : 0;
    return t;
}

// Back and forth, so that who had the longest tile of a round has the shortest of the next.
__device__ __forceinline__ int tile_index(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

struct Pipe {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Each group has its queries to itself: it goes on to the next tile without waiting for the others.
__device__ __forceinline__ void produce_q(Shared& s, const TensorMap* q_map, const Shape& shape) {
    u32 parity = 0;
    for (int round = 0; round * gridDim.x < shape.tiles; ++round) {
        int index = tile_index(round);
        if (index >= shape.tiles) continue;
        Tile t = tile_of(index, shape);
        if (!t.exists) continue;
        for (int g = 0; g < GROUPS; ++g) {
            barrier_wait(&s.q_empty[g], parity ^ 1);
            barrier_expect(&s.q_full[g], Q_BYTES / GROUPS);
            for (int p = 0; p < PANELS; ++p)
                tma_load(s.q + (p * GROUPS + g) * 64 * 128, q_map, 64 * p, t.first_q + t.m * BLOCK_M + 64 * g, t.head,
                         VARLEN ? 0 : t.batch, &s.q_full[g]);
        }
        parity ^= 1;
    }
}

__device__ __forceinline__ void produce_kv(Shared& s, const TensorMap* k_map, const TensorMap* v_map, const Shape& shape) {
    Pipe pipe;
    for (int round = 0; round * gridDim.x < shape.tiles; ++round) {
        int index = tile_index(round);
        if (index >= shape.tiles) continue;
        Tile t = tile_of(index, shape);
        if (!t.exists) continue;
        int kv_head = t.head / shape.group;
        for (int n = t.first_n + t.blocks_n - 1; n >= t.first_n; --n) {
            barrier_wait(&s.k_empty[pipe.stage], pipe.parity ^ 1);
            barrier_expect(&s.k_full[pipe.stage], KV_BYTES);
            for (int p = 0; p < PANELS; ++p)
                tma_load(s.k[pipe.stage] + p * BLOCK_N * 128, k_map, 64 * p, t.first_k + n * BLOCK_N, kv_head,
                         VARLEN ? 0 : t.batch, &s.k_full[pipe.stage]);
            barrier_wait(&s.v_empty[pipe.stage], pipe.parity ^ 1);
            barrier_expect(&s.v_full[pipe.stage], KV_BYTES);
            for (int p = 0; p < PANELS; ++p)
                tma_load(s.v[pipe.stage] + p * BLOCK_N * 128, v_map, 64 * p, t.first_k + n * BLOCK_N, kv_head,
                         VARLEN ? 0 : t.batch, &s.v_full[pipe.stage]);
            pipe.next();
        }
    }
}

// S = Q K^T: 64 queries of this group, BLOCK_N keys. q and k are descriptors, which count in 16 bytes.
__device__ __forceinline__ void scores(float (&sc)[BLOCK_N / 2], u64 q, u64 k) {
#pragma unroll
    for (int step = 0; step < (D + 15) / 16; ++step) {
        int panel = step / 4, within = step % 4;
        wgmma_scores(sc, q + panel * GROUPS * 64 * 8 + within * 2, k + panel * BLOCK_N * 8 + within * 2, step > 0);
    }
}

// O += P V, P in registers.
__device__ __forceinline__ void outputs(float (&o)[D / 2], const u32 (&p)[BLOCK_N / 4], u64 v) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {
        wgmma_outputs(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], v + step * 16 * 8);
    }
}

__device__ __forceinline__ void mask(float (&sc)[BLOCK_N / 2], int n, int row, const Tile& t, const Shape& shape) {
    int column = n * BLOCK_N + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int diagonal = row + 8 * h + t.seqlen_k - t.seqlen_q;
        int end = t.seqlen_k - column, begin = -1;
        if (RIGHT_BOUND) end = min(end, diagonal + shape.right + 1 - column);
        if (LEFT_BOUND) begin = diagonal - shape.left - column;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (8 * i + c >= end || (LEFT_BOUND && 8 * i + c < begin)) sc[4 * i + 2 * h + c] = -INFINITY;
    }
}

// cap tanh(score / cap), both in the unit that the softmax scales. tanh x = 1 - 2 / (1 + e^2x).
__device__ __forceinline__ void cap_scores(float (&sc)[BLOCK_N / 2], float cap) {
    float inverse = 2.8853900817779268f / cap;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) sc[i] = cap - 2.0f * cap * reciprocal(1.0f + exp2_fast(sc[i] * inverse));
}

// Rows past the end of a packed sequence are the next one's: their weights are zero, but zero times NaN is NaN.
__device__ __forceinline__ void clear_tail(unsigned char* v, int rows, int group) {
    if (rows >= BLOCK_N) return;
    for (int i = threadIdx.x & 127; i < (BLOCK_N - rows) * PANELS * 8; i += 128) {
        int panel = i / ((BLOCK_N - rows) * 8), rest = i % ((BLOCK_N - rows) * 8);
        *(uint4*)(v + panel * BLOCK_N * 128 + rows * 128 + rest * 16) = make_uint4(0, 0, 0, 0);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_sync(8 + group, 128);
}

// Online softmax (Milakov and Gimelshein, 2018): the scores become e^(score - top), `scale` is what the old sum shrinks by.
__device__ __forceinline__ void softmax(float (&sc)[BLOCK_N / 2], float (&top)[2], float (&sum)[2], float (&scale)[2],
                                        float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float m = sc[2 * h];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) m = fmaxf(m, fmaxf(sc[4 * i + 2 * h], sc[4 * i + 2 * h + 1]));
        m = fmaxf(top[h], quad_max(m));
        float shift = m == -INFINITY ? 0.0f : m * scale_log2;
        scale[h] = exp2_fast(top[h] * scale_log2 - shift);
        top[h] = m;
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float e = exp2_fast(sc[4 * i + 2 * h + c] * scale_log2 - shift);
                sc[4 * i + 2 * h + c] = e;
                part += e;
            }
        sum[h] = sum[h] * scale[h] + part;
    }
}

__device__ __forceinline__ void probabilities(u32 (&p)[BLOCK_N / 4], const float (&sc)[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i) {
        p[2 * i] = pack(sc[4 * i], sc[4 * i + 1]);
        p[2 * i + 1] = pack(sc[4 * i + 2], sc[4 * i + 3]);
    }
}

__device__ __forceinline__ void consume(Shared& s, const TensorMap* out_map, unsigned short* out, long long stride_out,
                                        long long stride_out_head, float* lse, const Sink* sinks, float scale_log2, float cap,
                                        const Shape& shape) {
    int group = threadIdx.x / 128 - 1, thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
    Pipe k_pipe, v_pipe;
    u32 q_parity = 0;
    unsigned char* q = s.q + group * 64 * 128;
    const u64 q_descriptor = descriptor(q, 16, 1024), k_descriptor = descriptor(s.k[0], 16, 1024);
    const u64 v_descriptor = descriptor(s.v[0], BLOCK_N * 128, 1024);
    if (GROUPS > 1 && group == GROUPS - 1) named_arrive(2, 256);
    for (int round = 0; round * gridDim.x < shape.tiles; ++round) {
        int index = tile_index(round);
        if (index >= shape.tiles) continue;
        Tile t = tile_of(index, shape);
        if (!t.exists) continue;
        int row_of_group = t.m * BLOCK_M + group * 64, row = row_of_group + warp * 16 + lane / 4;
        float o[D / 2], sc[BLOCK_N / 2];
        u32 p[BLOCK_N / 4];
        float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
        if (sinks != nullptr) {  // as if a key with this score and no value had come first
            top[0] = top[1] = widen(sinks[t.head]) * 1.4426950408889634f / scale_log2;
            sum[0] = sum[1] = (lane & 3) == 0 ? 1.0f : 0.0f;
        }
        barrier_wait(&s.q_full[group], q_parity);
        q_parity ^= 1;
        if (t.blocks_n == 0) {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
        } else {
            // Blocks from `whole_begin` up to `whole_end` need no mask.
            int diagonal = t.diagonal() + group * 64;
            int whole_end = RIGHT_BOUND ? min(t.seqlen_k, diagonal + shape.right + 1) : t.seqlen_k;
            int whole_begin = LEFT_BOUND ? diagonal + 63 - shape.left : 0;
            float scale[2];
            int n = t.first_n + t.blocks_n - 1;
            barrier_wait(&s.k_full[k_pipe.stage], k_pipe.parity);
            if (GROUPS > 1) named_sync(2 + group, 256);
            keep(sc);
            wgmma_fence();
            scores(sc, q_descriptor, k_descriptor + k_pipe.stage * (KV_BYTES / 16));
            wgmma_commit();
            if (GROUPS > 1) named_arrive(2 + (group + 1) % GROUPS, 256);
            wgmma_wait<0>();
            keep(sc);
            if (thread == 0) barrier_arrive(&s.k_empty[k_pipe.stage]);
            k_pipe.next();
            if (SOFTCAP) cap_scores(sc, cap);
            mask(sc, n, row, t, shape);
            softmax(sc, top, sum, scale, scale_log2);
            probabilities(p, sc);
            if (VARLEN) {
                barrier_wait(&s.v_full[v_pipe.stage], v_pipe.parity);
                clear_tail(s.v[v_pipe.stage], t.seqlen_k - n * BLOCK_N, group);
            }
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
            for (--n; n >= t.first_n; --n) {
                barrier_wait(&s.k_full[k_pipe.stage], k_pipe.parity);
                if (GROUPS > 1) named_sync(2 + group, 256);
                keep(sc);
                keep(o);
                wgmma_fence();
                scores(sc, q_descriptor, k_descriptor + k_pipe.stage * (KV_BYTES / 16));
                wgmma_commit();
                barrier_wait(&s.v_full[v_pipe.stage], v_pipe.parity);
                outputs(o, p, v_descriptor + v_pipe.stage * (KV_BYTES / 16));
                wgmma_commit();
                if (GROUPS > 1) named_arrive(2 + (group + 1) % GROUPS, 256);
                wgmma_wait<1>();
                keep(sc);
                if (thread == 0) barrier_arrive(&s.k_empty[k_pipe.stage]);
                k_pipe.next();
                if (SOFTCAP) cap_scores(sc, cap);
                if ((n + 1) * BLOCK_N > whole_end || (LEFT_BOUND && n * BLOCK_N < whole_begin)) mask(sc, n, row, t, shape);
                softmax(sc, top, sum, scale, scale_log2);
                wgmma_wait<0>();
                keep(o);
                if (thread == 0) barrier_arrive(&s.v_empty[v_pipe.stage]);
                v_pipe.next();
#pragma unroll
                for (int i = 0; i < D / 8; ++i)
#pragma unroll
                    for (int c = 0; c < 4; ++c) o[4 * i + c] *= scale[c / 2];
                probabilities(p, sc);
            }
            barrier_wait(&s.v_full[v_pipe.stage], v_pipe.parity);
            keep(o);
            wgmma_fence();
            outputs(o, p, v_descriptor + v_pipe.stage * (KV_BYTES / 16));
            wgmma_commit();
            wgmma_wait<0>();
            keep(o);
            if (thread == 0) barrier_arrive(&s.v_empty[v_pipe.stage]);
            v_pipe.next();
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = quad_sum(sum[h]);
            float inverse = total > 0.0f ? 1.0f / total : (total == 0.0f ? 0.0f : total);
            int r = row + 8 * h;
            if (lse != nullptr && (lane & 3) == 0 && r < t.seqlen_q)
                lse[(VARLEN ? t.head * shape.total_q + t.first_q
                            : ((long long)t.batch * shape.heads + t.head) * shape.seqlen_q) + r] =
                    total == 0.0f ? -INFINITY : (top[h] * scale_log2 + log2f(total)) * 0.6931471805599453f;
#pragma unroll
            for (int i = 0; i < D / 8; ++i)
#pragma unroll
                for (int c = 0; c < 2; ++c) o[4 * i + 2 * h + c] *= inverse;
        }
        // The output takes the place of this group's queries: their products are done.
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
            int panel = i / 8, chunk = i % 8, r = warp * 16 + lane / 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int at = (r + 8 * h) * 128 + ((chunk ^ (r & 7)) * 16) + (lane & 3) * 4;
                *(u32*)(q + panel * GROUPS * 64 * 128 + at) = pack(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_sync(8 + group, 128);
        if (!VARLEN || row_of_group + 64 <= t.seqlen_q) {
            if (thread == 0) {
                for (int panel = 0; panel < PANELS; ++panel)
                    tma_store(out_map, q + panel * GROUPS * 64 * 128, 64 * panel, t.first_q + row_of_group, t.head,
                              VARLEN ? 0 : t.batch);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            }
        } else {  // what follows in memory is the next sequence's
            for (int i = thread; i < 64 * D / 8; i += 128) {
                int r = i / (D / 8), chunk = i % (D / 8);
                uint4 value = *(uint4*)(q + chunk / 8 * GROUPS * 64 * 128 + r * 128 + ((chunk % 8) ^ (r & 7)) * 16);
                if (row_of_group + r < t.seqlen_q)
                    *(uint4*)(out + (t.first_q + row_of_group + r) * stride_out + t.head * stride_out_head + chunk * 8) = value;
            }
            named_sync(8 + group, 128);
        }
        if (thread == 0) barrier_arrive(&s.q_empty[group]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    flash_attention_kernel(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map, unsigned short* out,
                           long long stride_out, long long stride_out_head, float* lse,
                           const Sink* sinks, const Index* cu_q, const Index* cu_k, float scale_log2, float cap, long long batch, long long heads,
                           long long kv_heads, long long seqlen_q, long long seqlen_k, long long left, long long right,
                           long long section, long long total_q) {
    extern __shared__ unsigned char memory[];
    Shared& s = *(Shared*)((u64)(memory + 1023) & ~(u64)1023);
    Shape shape;
    shape.batch = batch, shape.heads = heads, shape.group = heads / kv_heads;
    shape.seqlen_q = seqlen_q, shape.seqlen_k = seqlen_k;
    shape.blocks_m = (seqlen_q + BLOCK_M - 1) / BLOCK_M;
    shape.cu_q = cu_q, shape.cu_k = cu_k, shape.total_q = total_q;
    shape.left = left, shape.right = right, shape.section = section;
    shape.tiles = shape.blocks_m * shape.batch * shape.heads;
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS; ++i) {
            barrier_init(&s.q_full[i], 1);
            barrier_init(&s.q_empty[i], 1);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.k_full[i], 1);
            barrier_init(&s.v_full[i], 1);
            barrier_init(&s.k_empty[i], GROUPS);
            barrier_init(&s.v_empty[i], GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce_kv(s, &k_map, &v_map, shape);
        if (threadIdx.x == 32) produce_q(s, &q_map, shape);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(s, &out_map, out, stride_out, stride_out_head, lse, sinks, scale_log2, cap, shape);
    }
}
