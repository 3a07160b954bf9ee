// Maps floats to unsigned integers that have the same order, and back.
inline uint in_order(float x) {
    uint bits = as_type<uint>(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float from_order(uint place) {
    return as_type<float>(place & 0x80000000u ? place & 0x7fffffffu : ~place);
}

// Each row has one threadgroup of 16 simdgroups, which reads the row 9 times. The first pass finds the largest logit.
// The other 8 passes find, four bits at a time, the least float above which there is less mass than top_p asks for;
// this float is a logit. Of the logits that begin with the digits found so far, a pass adds up the mass for each of the
// 16 possible next digits.
kernel void nucleus_threshold() {
    threadgroup float parts[16 * 16];
    uint row = threadgroup_position_in_grid.x, thread_index = thread_index_in_threadgroup;
    uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    auto x = logits + size_t(row) * V;
    float peak = -INFINITY;
    for (uint at = thread_index; at < V; at += 512) peak = metal::max(peak, x[at]);
    peak = simd_max(peak);
    if (lane == 0) parts[simd] = peak;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < 16; i++) peak = metal::max(peak, parts[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint digits = 0;  // those found so far; the others are 0
    float above = 0.0f, wanted = 0.0f;  // the mass of larger digits
    for (int shift = 28; shift >= 0; shift -= 4) {
        float sums[16];
        #pragma unroll
        for (uint i = 0; i < 16; i++) sums[i] = 0.0f;
        for (uint at = thread_index; at < V; at += 512) {
            uint place = in_order(x[at]);
            bool same = ((place ^ digits) >> shift) < 16;  // whether the digits before this one are the same
            float mass = same ? metal::exp(x[at] - peak) : 0.0f;
            uint digit = (place >> shift) & 15;
            #pragma unroll
            for (uint i = 0; i < 16; i++) sums[i] += digit == i ? mass : 0.0f;
        }
        #pragma unroll
        for (uint i = 0; i < 16; i++) {
            float sum = simd_sum(sums[i]);
            if (lane == 0) parts[simd * 16 + i] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float total = 0.0f;  // the mass of lane l's digit; every simdgroup computes the same
        for (uint i = 0; i < 16; i++) total += lane < 16 ? parts[i * 16 + lane] : 0.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (shift == 28) wanted = top_p[0] * simd_sum(total);
        // From the largest digit down, the last one above which there is less mass than wanted.
        uint digit = 15;
        float so_far = above;
        for (uint i = 15; i > 0; i--) {
            so_far += simd_broadcast(total, i);
            bool goes_on = digit == i && so_far < wanted;
            digit = goes_on ? i - 1 : digit;
            above = goes_on ? so_far : above;
        }
        digits |= digit << shift;
    }
    if (thread_index == 0) least[row] = from_order(digits);
}
