// Sampling for sm_90: a cluster of CTAs takes a row, reads its logits once and keeps their codes (fixed_point.py) in
// shared memory, where every pass finds them. One launch, no sort, no memory of its own.
//
// A limit (top_k, top_p) is found from the codes' upper bits to their lower ones. In each pass every CTA adds up, bin by
// bin, the tokens or the weight of its codes and sends its bins to all CTAs of the cluster; each adds up what it gets
// and finds the bin where the limit lies. All of them find the same, so none has to tell. Sums are integers: neither
// the order of the additions nor the number of CTAs changes a bit.
//
// What is sent carries its own signal: st.async writes to a peer's memory and counts the bytes at a barrier there. A
// cluster barrier in its place costs a fence of the whole GPU's memory, in every warp: with four passes of that kind
// top-p took 23.6 us a row on an H200, 13.6 of them in the passes.
//
// After fixed_point.cu, in one text. Specialised by macros: LOGITS, CLUSTER, THREADS, WIDE_TOP_K, HEADER_BYTES,
// CTAS (of a multiprocessor).

enum { FLOAT32, BFLOAT16, FLOAT16 };

constexpr int WARPS = THREADS / 32;
constexpr int FIRST_SHIFT = 21, FIRST_BINS = (CODE_END >> FIRST_SHIFT) + 1;
constexpr int PASSES = 4, PASS_BITS = 7, PASS_BINS = 1 << PASS_BITS;  // codes have 30 bits: 9, then 7, 7 and 7
static_assert(FIRST_BINS <= THREADS, "a bin a thread");
constexpr int BIN_WARPS = (FIRST_BINS + 31) / 32;
constexpr int LANE_CODES = 4;                // that a lane takes at a time: 16 bytes of shared memory
constexpr int WARP_CODES = 32 * LANE_CODES;  // that a warp takes at a time
constexpr int LOADS = 8;                     // in flight a thread
constexpr int LOGIT_BYTES = LOGITS == FLOAT32 ? 4 : 2;

struct Shared {
    // What the cluster's CTAs send, each to its own element; passes use the two sets of bins by turns.
    ulonglong2 drawn_from[CLUSTER];
    u64 even[CLUSTER][FIRST_BINS];
    u64 odd[CLUSTER][PASS_BINS];
    float largest[CLUSTER];
    // Barriers, each of them passed when all has come.
    u64 largest_came, drawn_from_came, bins_came[2];
    // Of this CTA.
    u64 bins[FIRST_BINS];
    u64 warp_amounts[WARPS];
    u32 warp_equals[WARPS];
    float warp_largest[WARPS];
    u64 found_below;
    u32 found_bin;
};
static_assert(sizeof(Shared) <= HEADER_BYTES && HEADER_BYTES % 128 == 0, "the codes follow");

// The hardware.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 peer_address(const void* p, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}

// To the same place in the memory of a CTA of the cluster, with word to its barrier.
__device__ __forceinline__ void send(float* target, float value, u64* barrier, u32 rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     peer_address(target, rank)), "f"(value), "r"(peer_address(barrier, rank)) : "memory");
}

__device__ __forceinline__ void send(u64* target, u64 value, u64* barrier, u32 rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(
                     peer_address(target, rank)), "l"(value), "r"(peer_address(barrier, rank)) : "memory");
}

// One arrival, of the thread that says how many bytes are to come, ends a barrier's phase together with them.
__device__ __forceinline__ void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool barrier_passed(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}" : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return done != 0;
}

__device__ __forceinline__ void give_up() { __trap(); }

__device__ __forceinline__ void wait_for_the_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void launch_the_kernel_after() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// What is waited for takes less than a microsecond; a wait of seconds is an error, and must not hang.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    for (int tries = 0; !barrier_passed(barrier, parity); ++tries) {
        if (tries == 1 << 24) give_up();
    }
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

// Four logits as they lie in memory; those of 16 bits take x and y.
__device__ __forceinline__ uint4 load(const unsigned char* p) {
    if (LOGITS == FLOAT32) return *reinterpret_cast<const uint4*>(p);
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    return make_uint4(v.x, v.y, 0, 0);
}

constexpr u32 MINUS_INFINITY = LOGITS == FLOAT32 ? 0xff800000u : LOGITS == BFLOAT16 ? 0xff80ff80u : 0xfc00fc00u;

// The first logit of a word, of which 16-bit logits use the lower half.
__device__ __forceinline__ float to_float(u32 word) {
    if (LOGITS == FLOAT32) return __uint_as_float(word);
    return LOGITS == BFLOAT16 ? __uint_as_float(word << 16) : half_to_float((u16)word);
}

__device__ __forceinline__ float4 to_floats(uint4 v) {
    if (LOGITS == FLOAT32) return make_float4(to_float(v.x), to_float(v.y), to_float(v.z), to_float(v.w));
    return make_float4(to_float(v.x), to_float(v.x >> 16), to_float(v.y), to_float(v.y >> 16));
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
// codes below its own and some of those equal to it. The bins are empty, or hold the first pass if that is `counted`.
// `exchange` counts the cluster's exchanges of bins.
template <bool BY_WEIGHT>
__device__ __forceinline__ Limit find(Shared& s, const Codes& codes, u32 rank, bool counted, u32& exchange, Limit so_far,
                                      u64 target, float top_p) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u64 equal_weight = BY_WEIGHT ? so_far.equals * weight_of(so_far.code) : 0;
    int prefix = 0, shift = FIRST_SHIFT, bits = 9;
    u64 below = 0;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass, ++exchange) {
        const int mask = (1 << bits) - 1, num_bins = pass == 0 ? FIRST_BINS : PASS_BINS;
        if (pass > 0 || !counted) {
            codes.each([&](int code) {
                if (code < so_far.code && code >> (shift + bits) == prefix) {
                    add_to_bin<BY_WEIGHT>(s.bins, code, shift, mask);
                }
            });
        }
        __syncthreads();
        // A set of bins, or its barrier, is used again two exchanges on. A peer sends that only after it has what this
        // CTA sends in between, which is after all its threads have read the set: they meet below.
        u64* const came = &s.bins_came[exchange & 1];
        u64* const sets = pass & 1 ? &s.odd[0][0] : &s.even[0][0];
        if (thread == 0) barrier_expect(came, CLUSTER * num_bins * sizeof(u64));
        u64 amount = 0;
        if (thread < num_bins) {
            const u64 own = s.bins[thread];
            s.bins[thread] = 0;
#pragma unroll
            for (u32 i = 0; i < CLUSTER; ++i) {
                send(&sets[rank * num_bins + thread], own, came, (rank + i) % CLUSTER);
            }
            barrier_wait(came, exchange >> 1 & 1);
#pragma unroll
            for (u32 i = 0; i < CLUSTER; ++i) amount += sets[i * num_bins + thread];
            if (so_far.code >> (shift + bits) == prefix && ((so_far.code >> shift) & mask) == thread) amount += equal_weight;
        }
        u64 upto = warp_running_sum(amount);
        if (lane == 31) s.warp_amounts[warp] = upto;
        __syncthreads();
        u64 total = 0;
#pragma unroll
        for (int w = 0; w < BIN_WARPS; ++w) {
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

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
sample_kernel(const unsigned char* logits, i64* ids, unsigned char* valid_out, const float* temperatures,
              const TopK* top_ks, const float* top_ps, const float* min_ps, const u64* seeds, const u64* offsets,
              i64 vocab_size_, i64 stride_bytes, i64 steps_, i64 temperature_step, i64 top_k_step,
              i64 top_p_step, i64 min_p_step, i64 seed_step, i64 offset_step, i64 counts_rows, i64 top_k, u64 seed,
              u64 offset, float temperature, float top_p, float min_p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rank = cluster_rank();
    const i64 row = blockIdx.x / CLUSTER;
    if (thread == 0) {
        barrier_init(&s.largest_came);
        barrier_init(&s.drawn_from_came);
        barrier_init(&s.bins_came[0]);
        barrier_init(&s.bins_came[1]);
        barriers_are_ready();
        barrier_expect(&s.largest_came, CLUSTER * sizeof(float));
        barrier_expect(&s.drawn_from_came, CLUSTER * sizeof(ulonglong2));
    }
    // No CTA sends to another before that one runs and has its barriers.
    cluster_arrive();
    if (thread < FIRST_BINS) s.bins[thread] = 0;

    // A warp's codes lie together, and so do a CTA's: rank, warp, step and lane in the order of the vocabulary.
    const int steps = (int)steps_, vocab_size = (int)vocab_size_;
    int4* warp_codes = reinterpret_cast<int4*>(memory + HEADER_BYTES) + warp * steps * 32;
    const Codes codes = {warp_codes + lane, steps};
    const int warp_start = (rank * WARPS + warp) * steps * WARP_CODES, lane_start = warp_start + lane * LANE_CODES;

    wait_for_the_kernel_before();
    launch_the_kernel_after();
    temperature = parameter(temperatures, temperature_step, row, temperature);
    top_k = parameter(top_ks, top_k_step, row, top_k);
    top_p = parameter(top_ps, top_p_step, row, top_p);
    min_p = parameter(min_ps, min_p_step, row, min_p);
    seed = parameter(seeds, seed_step, row, seed);
    offset = parameter(offsets, offset_step, row, offset);

    // NaN stays what it is: it is never the largest, and its code is CODE_END.
    float largest = __uint_as_float(0xff800000u);
    const unsigned char* const logits_row = logits + row * stride_bytes;
    for (int first = 0; first < steps; first += LOADS) {
        uint4 raw[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int at = lane_start + (first + i) * WARP_CODES;
            raw[i] = make_uint4(MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY);
            if (first + i < steps && at + LANE_CODES <= vocab_size) raw[i] = load(logits_row + (i64)at * LOGIT_BYTES);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (first + i < steps) {
                const float4 x = to_floats(raw[i]);
                largest = fmaxf(largest, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
                reinterpret_cast<float4*>(codes.mine)[(first + i) * 32] = x;
            }
        }
    }
    // The row's last one to three logits, where they do not fill four: one lane of the cluster has them.
    const int last = vocab_size & ~(LANE_CODES - 1), last_step = (last - lane_start) / WARP_CODES;
    if (last < vocab_size && last >= lane_start && last_step < steps && lane_start + last_step * WARP_CODES == last) {
        for (int i = 0; i < vocab_size - last; ++i) {
            const unsigned char* p = logits_row + (i64)(last + i) * LOGIT_BYTES;
            const float x = to_float(LOGITS == FLOAT32 ? *reinterpret_cast<const u32*>(p) : *reinterpret_cast<const u16*>(p));
            largest = fmaxf(largest, x);
            reinterpret_cast<float*>(&codes.mine[last_step * 32])[i] = x;
        }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    if (lane == 0) s.warp_largest[warp] = largest;
    cluster_wait();
    __syncthreads();
    if (warp == 0) {
        largest = s.warp_largest[lane % WARPS];
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        }
        if (lane < CLUSTER) send(&s.largest[rank], largest, &s.largest_came, lane);
    }
    barrier_wait(&s.largest_came, 0);
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
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) values[i] = code_of(__int_as_float(values[i]), largest, scale);
        codes.mine[step * 32] = make_int4(values[0], values[1], values[2], values[3]);
#pragma unroll
        for (int i = 0; i < LANE_CODES; ++i) {
            if (count) {
                add_to_bin<false>(s.bins, values[i], FIRST_SHIFT, 511);
            } else if (weigh) {
                add_to_bin<true>(s.bins, values[i], FIRST_SHIFT, 511);
            } else {
                draw_from(values[i]);
            }
        }
    }

    u32 exchange = 0;
    if (count) limit = find<false>(s, codes, rank, true, exchange, limit, top_k, 0.0f);
    if (weigh) limit = find<true>(s, codes, rank, !count, exchange, limit, 0, top_p);
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
            send(&s.drawn_from[rank].x, all, &s.drawn_from_came, lane);
            send(&s.drawn_from[rank].y, (u64)all_equals, &s.drawn_from_came, lane);
        }
    }
    barrier_wait(&s.drawn_from_came, 0);

    // Nothing more is sent. `seen` counts the codes equal to the limit so far.
    auto with_equals = [&](u64 below, u32 number, u32 seen) {
        u32 left = seen < limit.equals ? limit.equals - seen : 0;
        return below + (u64)min(number, left) * equal_weight;
    };
    u64 total = 0, before = 0;
    u32 seen = 0, seen_before = 0;
#pragma unroll
    for (int peer = 0; peer < CLUSTER; ++peer) {
        if (peer == rank) before = total, seen_before = seen;
        const u32 number = (u32)s.drawn_from[peer].y;
        total += with_equals(s.drawn_from[peer].x, number, seen);
        seen += number;
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
