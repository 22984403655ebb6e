// Sampling for sm_90: a cluster of CTAs takes a row, reads its logits once and keeps their codes (fixed_point.py) in
// shared memory, where every pass finds them. One launch, no sort, no memory of its own.
//
// A limit (top_k, top_p) is found from the codes' upper bits to their lower ones: in each pass every CTA adds up, bin by
// bin, the tokens or the weight of its codes, and after a cluster barrier every CTA adds up all the cluster's bins and
// finds the one where the limit lies. All of them find the same, so none has to tell. Sums are integers: neither the
// order of the additions nor the number of CTAs changes a bit.
//
// Bytes a row: its logits once. Of time, with 4 CTAs a row at 128256 logits: 3.5 us to read, a pass over the codes about
// 1 us, of which there are 4 for each limit and 2 for the rest; a barrier with its exchange 0.7 us.
//
// Specialised by macros: LOGITS, CLUSTER, THREADS, WIDE_TOP_K, HEADER_BYTES; and C0 ... C6, the polynomial.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

enum { FLOAT32, BFLOAT16, FLOAT16 };

constexpr int WARPS = THREADS / 32;
constexpr int CODE_BITS = 24;
constexpr int CODE_END = 41 << CODE_BITS;
constexpr int CODE_BEYOND = (1 << 30) - 1;  // of a place past the row's end
constexpr int FIRST_SHIFT = 21, FIRST_BINS = (CODE_END >> FIRST_SHIFT) + 1;
constexpr int PASSES = 4, PASS_BITS = 7;  // codes have 30 bits: 9, then 7, 7 and 7
constexpr int BINS = 352;
static_assert(FIRST_BINS <= BINS && BINS <= THREADS, "a bin a thread");
constexpr int LANE_CODES = 4;                // that a lane takes at a time: 16 bytes of shared memory
constexpr int WARP_CODES = 32 * LANE_CODES;  // that a warp takes at a time
constexpr int LOADS = 8;                     // in flight a thread

struct Shared {
    // Two sets of bins by turns: while one CTA still reads another's, that one may already fill its other set.
    u64 bins[2][BINS];
    // Written by the cluster's CTAs, each its own element.
    u64 amounts[CLUSTER];
    u32 equals[CLUSTER];
    float largest[CLUSTER];
    u64 warp_amounts[WARPS];
    u32 warp_equals[WARPS];
    float warp_largest[WARPS];
    u64 found_below;
    u32 found_bin;
};
constexpr int CODES_OFFSET = HEADER_BYTES;
static_assert(sizeof(Shared) <= HEADER_BYTES && HEADER_BYTES % 128 == 0, "the codes follow");

// The hardware.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 peer_address(const void* p, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
    return address;
}

__device__ __forceinline__ u64 peer_load(const u64* p, u32 rank) {
    u64 value;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(peer_address(p, rank)) : "memory");
    return value;
}

__device__ __forceinline__ void peer_store(u32* p, u32 rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer_address(p, rank)), "r"(value) : "memory");
}

__device__ __forceinline__ void peer_store(u64* p, u32 rank, u64 value) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(peer_address(p, rank)), "l"(value) : "memory");
}

__device__ __forceinline__ void wait_for_the_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void launch_the_kernel_after() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}

// The sum of this lane's value and those of the lanes before it.
template <class T>
__device__ __forceinline__ T warp_running_sum(T value) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        T other = __shfl_up_sync(0xffffffffu, value, lanes);
        if (threadIdx.x % 32 >= lanes) value += other;
    }
    return value;
}

// The arithmetic of fixed_point.py.

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

// Four logits of a row from `first` on, as float32; NaN, and what lies past the row's end, is -inf.
__device__ __forceinline__ float4 load_logits(const unsigned char* row, i64 first, i64 vocab_size) {
    float x[LANE_CODES];
    if (first + LANE_CODES <= vocab_size) {
        if (LOGITS == FLOAT32) {
            float4 v = *reinterpret_cast<const float4*>(row + 4 * first);
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        } else {
            uint2 v = *reinterpret_cast<const uint2*>(row + 2 * first);
            const u32 pairs[2] = {v.x, v.y};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                bool brain = LOGITS == BFLOAT16;
                x[2 * i] = brain ? __uint_as_float(pairs[i] << 16) : half_to_float((u16)pairs[i]);
                x[2 * i + 1] = brain ? __uint_as_float(pairs[i] & 0xffff0000u) : half_to_float((u16)(pairs[i] >> 16));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) {
            x[i] = __uint_as_float(0xff800000u);
            if (first + i < vocab_size) {
                if (LOGITS == FLOAT32) x[i] = reinterpret_cast<const float*>(row)[first + i];
                if (LOGITS == BFLOAT16) x[i] = __uint_as_float((u32) reinterpret_cast<const u16*>(row)[first + i] << 16);
                if (LOGITS == FLOAT16) x[i] = half_to_float(reinterpret_cast<const u16*>(row)[first + i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_CODES; ++i) x[i] = x[i] == x[i] ? x[i] : __uint_as_float(0xff800000u);
    return make_float4(x[0], x[1], x[2], x[3]);
}

// The codes of one thread: `steps` times four, WARP_CODES apart.
struct Codes {
    int4* mine;
    int steps;

    template <class Function>
    __device__ __forceinline__ void each(Function function) const {
#pragma unroll 2
        for (int step = 0; step < steps; ++step) {
            int4 four = mine[step * 32];
            function(four.x);
            function(four.y);
            function(four.z);
            function(four.w);
        }
    }
};

struct Limit {
    int code;    // codes below it are kept,
    u32 equals;  // and of those equal to it the first so many
};

// Shared memory adds 32 bits at a time: the carry out of the lower half goes to the upper one.
__device__ __forceinline__ void add_weight(u64* bin, u64 weight) {
    u32* halves = reinterpret_cast<u32*>(bin);
    u32 low = (u32)weight, high = (u32)(weight >> 32);
    u32 before = atomicAdd(&halves[0], low);
    high += before + low < before;
    if (high != 0) atomicAdd(&halves[1], high);
}

// What a code adds to the bin of its bits from `shift` on.
template <bool BY_WEIGHT>
__device__ __forceinline__ void add_to_bin(u64* bins, int code, int shift, int mask) {
    u64* bin = &bins[(code >> shift) & mask];
    if (BY_WEIGHT) {
        u64 weight = weight_of(code);
        if (weight != 0) add_weight(bin, weight);
    } else {
        atomicAdd(reinterpret_cast<u32*>(bin), 1u);
    }
}

// The smallest code at or below which `target` tokens lie, or the fraction `top_p` of the weight. `so_far` counts
// codes below its own and some of those equal to it. `turn` is the set of bins to use next; it is empty, or holds the
// first pass if that is `counted` already.
template <bool BY_WEIGHT>
__device__ __forceinline__ Limit find(Shared& s, const Codes& codes, bool counted, int& turn, Limit so_far, u64 target,
                                      float top_p) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u64 equal_weight = BY_WEIGHT ? so_far.equals * weight_of(so_far.code) : 0;
    int prefix = 0, shift = FIRST_SHIFT, bits = 9;
    u64 below = 0;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        const int mask = (1 << bits) - 1, num_bins = pass == 0 ? FIRST_BINS : 1 << PASS_BITS;
        if (pass > 0 || !counted) {
            codes.each([&](int code) {
                if (code < so_far.code && code >> (shift + bits) == prefix) {
                    add_to_bin<BY_WEIGHT>(s.bins[turn], code, shift, mask);
                }
            });
        }
        cluster_arrive();
        cluster_wait();
        u64 amount = 0;
        if (thread < num_bins) {
            u64 parts[CLUSTER];
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) parts[rank] = peer_load(&s.bins[turn][thread], rank);
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) amount += parts[rank];
            if (so_far.code >> (shift + bits) == prefix && ((so_far.code >> shift) & mask) == thread) amount += equal_weight;
        }
        turn ^= 1;
        // All CTAs have read this set, in the pass before.
        if (thread < BINS) s.bins[turn][thread] = 0;
        u64 upto = warp_running_sum(amount);
        if (lane == 31) s.warp_amounts[warp] = upto;
        __syncthreads();
        u64 total = 0;
#pragma unroll
        for (int w = 0; w < (BINS + 31) / 32; ++w) {
            u64 other = s.warp_amounts[w];
            if (w < warp) upto += other;
            total += other;
        }
        // The first token is always kept.
        if (BY_WEIGHT && pass == 0) target = max(times_fraction(total, top_p), 1ull);
        upto += below;
        if (upto - amount < target && target <= upto) {
            s.found_bin = thread;
            s.found_below = upto - amount;
        }
        __syncthreads();
        prefix = prefix << bits | s.found_bin;
        below = s.found_below;
        bits = PASS_BITS;
        shift -= PASS_BITS;
    }
    u64 wanted = target - below;
    if (BY_WEIGHT) {
        u64 weight = weight_of(prefix);
        wanted = (wanted + weight - 1) / weight;
        if (prefix == so_far.code) wanted = min(wanted, (u64)so_far.equals);
    }
    return {prefix, (u32)min(wanted, 0xffffffffull)};
}

// A row's number: the tensor's, or `number` where there is no tensor.
template <class T, class Number>
__device__ __forceinline__ Number parameter(const T* tensor, i64 step, i64 row, Number number) {
    return tensor == nullptr ? number : (Number)tensor[row * step];
}

#if WIDE_TOP_K
typedef i64 TopK;
#else
typedef int TopK;
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
sample_kernel(const unsigned char* logits, i64* ids, unsigned char* valid_out, const float* temperatures,
              const TopK* top_ks, const float* top_ps, const float* min_ps, const u64* seeds, const u64* offsets,
              i64 vocab_size, i64 stride_bytes, i64 steps, i64 temperature_step, i64 top_k_step,
              i64 top_p_step, i64 min_p_step, i64 seed_step, i64 offset_step, i64 counts_rows, i64 top_k, u64 seed,
              u64 offset, float temperature, float top_p, float min_p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rank = cluster_rank();
    const i64 row = blockIdx.x / CLUSTER;
    // No CTA writes to another before that one runs.
    cluster_arrive();
    if (thread < BINS) s.bins[0][thread] = 0;

    // A warp's codes lie together, and so do a CTA's: rank, warp, step and lane in the order of the vocabulary.
    int4* warp_codes = reinterpret_cast<int4*>(memory + CODES_OFFSET) + warp * steps * 32;
    const Codes codes = {warp_codes + lane, (int)steps};
    const i64 warp_start = ((i64)rank * WARPS + warp) * steps * WARP_CODES;
    const i64 lane_start = warp_start + lane * LANE_CODES;

    wait_for_the_kernel_before();
    launch_the_kernel_after();
    temperature = parameter(temperatures, temperature_step, row, temperature);
    top_k = parameter(top_ks, top_k_step, row, top_k);
    top_p = parameter(top_ps, top_p_step, row, top_p);
    min_p = parameter(min_ps, min_p_step, row, min_p);
    seed = parameter(seeds, seed_step, row, seed);
    offset = parameter(offsets, offset_step, row, offset);

    float largest = __uint_as_float(0xff800000u);
    for (int first = 0; first < steps; first += LOADS) {
        float4 x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (first + i < steps) {
                x[i] = load_logits(logits + row * stride_bytes, lane_start + (first + i) * WARP_CODES, vocab_size);
            }
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (first + i < steps) {
                largest = fmaxf(largest, fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w)));
                reinterpret_cast<float4*>(codes.mine)[(first + i) * 32] = x[i];
            }
        }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    if (lane == 0) s.warp_largest[warp] = largest;
    __syncthreads();
    cluster_wait();
    if (warp == 0) {
        largest = s.warp_largest[lane % WARPS];
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        }
        if (lane < CLUSTER) peer_store(reinterpret_cast<u32*>(&s.largest[rank]), lane, __float_as_uint(largest));
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int peer = 0; peer < CLUSTER; ++peer) largest = fmaxf(largest, s.largest[peer]);

    const float infinity = __uint_as_float(0x7f800000u);
    const bool valid = largest > -infinity && temperature >= 0.0f && temperature < infinity;
    if (!valid) {  // for the whole cluster
        if (rank == 0 && thread == 0) ids[row] = 0, valid_out[row] = 0;
        return;
    }
    const bool greedy = temperature == 0.0f || top_k == 1;
    const bool count = !greedy && top_k > 1 && top_k < vocab_size, weigh = !greedy && !(top_p >= 1.0f);
    Limit limit = greedy ? Limit{0, 1} : Limit{CODE_END + 1, 0};
    const u64 smallest = times_fraction(1ull << 40, min_p);
    // What is drawn from, of this thread: the weight of the codes below the limit, and how many are equal to it.
    u64 amount = 0;
    u32 equals = 0;
    auto draw_from = [&](int code) {
        u64 weight = weight_of(code);
        amount += code < limit.code && weight >= smallest ? weight : 0;
        equals += code == limit.code;
    };

    // The codes, and with them the first thing that is asked of them.
    // An infinite scale gives the largest logits the code 0 and all others weight 0.
    const float scale = greedy ? infinity : __fdiv_rn(1.4426950408889634f, temperature);
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
        int4 four = codes.mine[step * 32];
        int values[LANE_CODES] = {four.x, four.y, four.z, four.w};
        const i64 first = lane_start + step * WARP_CODES;
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) {
            int code = code_of(__int_as_float(values[i]), largest, scale);
            values[i] = first + i < vocab_size ? code : CODE_BEYOND;
        }
        codes.mine[step * 32] = make_int4(values[0], values[1], values[2], values[3]);
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) {
            if (count) {
                if (values[i] <= CODE_END) add_to_bin<false>(s.bins[0], values[i], FIRST_SHIFT, 511);
            } else if (weigh) {
                if (values[i] < CODE_END) add_to_bin<true>(s.bins[0], values[i], FIRST_SHIFT, 511);
            } else {
                draw_from(values[i]);
            }
        }
    }

    int turn = 0;
    if (count) limit = find<false>(s, codes, true, turn, limit, top_k, 0.0f);
    if (weigh) limit = find<true>(s, codes, !count, turn, limit, 0, top_p);
    if (count || weigh) codes.each(draw_from);
    u64 equal_weight = weight_of(limit.code);
    if (equal_weight < smallest) equal_weight = 0;
    amount = warp_sum(amount);
    equals = __reduce_add_sync(0xffffffffu, equals);
    if (lane == 0) s.warp_amounts[warp] = amount, s.warp_equals[warp] = equals;
    __syncthreads();
    if (warp == 0) {
        u64 all = warp_sum(lane < WARPS ? s.warp_amounts[lane] : 0);
        u32 all_equals = __reduce_add_sync(0xffffffffu, lane < WARPS ? s.warp_equals[lane] : 0);
        if (lane < CLUSTER) {
            peer_store(&s.amounts[rank], lane, all);
            peer_store(&s.equals[rank], lane, all_equals);
        }
    }
    cluster_arrive();
    cluster_wait();

    // From here on no CTA reads or writes another's memory. `seen` counts the codes equal to the limit so far.
    auto with_equals = [&](u64 below, u32 number, u32 seen) {
        u32 left = seen < limit.equals ? limit.equals - seen : 0;
        return below + (u64)min(number, left) * equal_weight;
    };
    u64 total = 0, before = 0;
    u32 seen = 0, seen_before = 0;
#pragma unroll
    for (int peer = 0; peer < CLUSTER; ++peer) {
        if (peer == rank) before = total, seen_before = seen;
        total += with_equals(s.amounts[peer], s.equals[peer], seen);
        seen += s.equals[peer];
    }
    const u64 part = random_part(total, seed, counts_rows ? row : 0, offset);
    seen = seen_before;
#pragma unroll 1
    for (int w = 0; w < warp; ++w) {
        before += with_equals(s.warp_amounts[w], s.warp_equals[w], seen);
        seen += s.warp_equals[w];
    }
    if (part < before || part >= before + with_equals(amount, equals, seen)) return;

    // One warp of the cluster comes here: it walks its codes until the running sum exceeds the part.
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int4 four = codes.mine[step * 32];
        const int values[LANE_CODES] = {four.x, four.y, four.z, four.w};
        u32 number = 0;
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) number += values[i] == limit.code;
        const u32 number_upto = warp_running_sum(number);
        u32 lane_seen = seen + number_upto - number;
        u64 upto[LANE_CODES], lane_amount = 0;
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) {
            u64 weight = weight_of(values[i]);
            if (values[i] < limit.code && weight >= smallest) lane_amount += weight;
            if (values[i] == limit.code) lane_amount += lane_seen++ < limit.equals ? equal_weight : 0;
            upto[i] = lane_amount;
        }
        const u64 amount_upto = warp_running_sum(lane_amount);
        const u64 lane_before = before + amount_upto - lane_amount;
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) {
            const u64 first = lane_before + (i == 0 ? 0 : upto[i - 1]);
            if (first <= part && part < lane_before + upto[i]) {
                ids[row] = warp_start + step * WARP_CODES + lane * LANE_CODES + i;
                valid_out[row] = 1;
            }
        }
        before += __shfl_sync(0xffffffffu, amount_upto, 31);
        seen += __shfl_sync(0xffffffffu, number_upto, 31);
        if (part < before) return;
    }
}
