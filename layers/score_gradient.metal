// The gradient of softmax. A simdgroup reads a row of scores twice: first for the sums, which the lanes combine at the
// end, and then for the results. A column that the query does not see has weight 0 and gradient 0.
kernel void score_gradient() {
    constexpr float LOW = -1e30f;  // finite, because -inf minus -inf would be nan
    uint lane = thread_index_in_simdgroup, row = thread_position_in_grid.y;
    uint num_heads = scores_shape[1], length = scores_shape[2], width = scores_shape[3];
    if (row >= uint(scores_shape[0]) * num_heads * length) return;
    uint query = row % length;
    uint end = CAUSAL ? width - length + query + 1 : width;  // the queries are at the last columns
    auto x = scores + size_t(row) * width;
    auto d = d_weights + size_t(row) * width;
    auto seen = mask + (MASKED ? (size_t(row / (num_heads * length)) * length + query) * width : 0);
    float factor = scale[0] * 1.44269504f;  // weights are powers of two
    float peak = LOW, sum = 0.0f, moment = 0.0f;
    for (uint column = lane; column < end; column += 32) {
        bool counts = !MASKED || seen[MASKED ? column : 0];
        float score = counts ? x[column] * factor : LOW;
        float higher = metal::max(peak, score);
        float shrink = metal::fast::exp2(peak - higher), weight = counts ? metal::fast::exp2(score - higher) : 0.0f;
        sum = sum * shrink + weight;
        moment = moment * shrink + weight * float(d[column]);
        peak = higher;
    }
    float highest = simd_max(peak), shrink = metal::fast::exp2(peak - highest);
    sum = simd_sum(sum * shrink);
    float mean = simd_sum(moment * shrink) / sum;
    for (uint column = lane; column < width; column += 32) {
        bool counts = column < end && (!MASKED || seen[MASKED ? column : 0]);
        float weight = counts ? metal::fast::exp2(x[column] * factor - highest) / sum : 0.0f;
        weights[size_t(row) * width + column] = static_cast<T>(weight);
        d_scores[size_t(row) * width + column] = static_cast<T>(weight * (float(d[column]) - mean) * scale[0]);
    }
}
