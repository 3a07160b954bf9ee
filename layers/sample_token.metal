// Each of 32 lanes has one weight. Returns the place at which their running sum first exceeds the fraction `uniform` of
// the total. The sum is added up in order, so that it never decreases and never stops at a weight of 0.
inline uint draw(float weight, float uniform) {
    float total = 0.0f, until = 0.0f;
    for (uint i = 0; i < 32; i++) total += simd_broadcast(weight, i);
    float target = metal::min(uniform, 1.0f - 1.0f / 4194304.0f) * total;
    uint place = 0;
    for (uint i = 0; i < 32; i++) {
        until += simd_broadcast(weight, i);
        place += until <= target ? 1 : 0;
    }
    return place < 32 ? place : 0;
}

kernel void sample_token() {
    #include "row.metal"
    if (simd > 0) return;
    auto uniform = uniforms + row * 4;
    float weight = 0.0f;  // of lane l's group of 32 tiles
    for (uint i = 0; i < 32; i++) {
        uint tile = lane * 32 + i;
        if (tile < NUM_TILES) weight += sums[tile] * metal::exp(peaks[tile] - peak);
    }
    uint tile = draw(weight, uniform[0]) * 32 + lane;
    weight = tile < NUM_TILES ? sums[tile] * metal::exp(peaks[tile] - peak) : 0.0f;
    tile = tile - lane + draw(weight, uniform[1]);
    float level = peaks[tile] == -INFINITY ? 0.0f : peaks[tile];
    float own = 0.0f;  // of lane l's block of 32 logits
    for (uint i = 0; i < 32; i++) {
        uint at = tile * 1024 + i * 32 + lane;
        float sum = simd_sum(at < V ? metal::exp(float(x[at]) / heat - level) : 0.0f);
        own = i == lane ? sum : own;
    }
    uint at = tile * 1024 + draw(own, uniform[2]) * 32 + lane;
    weight = at < V ? metal::exp(float(x[at]) / heat - level) : 0.0f;
    uint token = at - lane + draw(weight, uniform[3]);
    if (lane == 0) {
        tokens[row] = token;
        logprobs[row] = (float(x[token]) / heat - peak) - log_total;
        entropies[row] = log_total - moment / total;
    }
}
