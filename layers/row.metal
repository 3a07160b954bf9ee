    // The common part of the kernels on rows of logits. Each row has one threadgroup of 16 simdgroups and is split into
    // tiles of 1,024 logits; one simdgroup processes a tile. Lane l holds every 32nd logit from l on in registers, so a
    // tile is read once. A tile's sums are relative to its own largest logit, and are combined at the end.
    constexpr uint NUM_TILES = (V + 1023) / 1024;
    threadgroup float peaks[NUM_TILES];
    threadgroup float sums[NUM_TILES];
    threadgroup float moments[NUM_TILES];  // of weight * (logit - peak)
    uint row = threadgroup_position_in_grid.x;
    uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    auto x = logits + size_t(row) * V;
    float heat = temperature[0];
    for (uint tile = simd; tile < NUM_TILES; tile += 16) {
        float held[32];
        float highest = -INFINITY;
        #pragma unroll
        for (uint i = 0; i < 32; i++) {
            uint at = tile * 1024 + i * 32 + lane;
            held[i] = at < V ? float(x[at]) / heat : -INFINITY;
            highest = metal::max(highest, held[i]);
        }
        highest = simd_max(highest);
        float level = highest == -INFINITY ? 0.0f : highest;  // -inf minus -inf would be nan
        float sum = 0.0f, moment = 0.0f;
        #pragma unroll
        for (uint i = 0; i < 32; i++) {
            float weight = metal::exp(held[i] - level);
            sum += weight;
            moment += weight > 0.0f ? weight * (held[i] - level) : 0.0f;
        }
        sum = simd_sum(sum);
        moment = simd_sum(moment);
        if (lane == 0) {
            peaks[tile] = highest;
            sums[tile] = sum;
            moments[tile] = moment;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float peak = -INFINITY, total = 0.0f, moment = 0.0f;
    for (uint tile = lane; tile < NUM_TILES; tile += 32) peak = metal::max(peak, peaks[tile]);
    peak = simd_max(peak);
    for (uint tile = lane; tile < NUM_TILES; tile += 32) {
        float weight = metal::exp(peaks[tile] - peak);
        total += sums[tile] * weight;
        moment += weight > 0.0f ? (moments[tile] + (peaks[tile] - peak) * sums[tile]) * weight : 0.0f;
    }
    total = simd_sum(total);
    moment = simd_sum(moment);
    float log_total = metal::log(total);
