// One thread an element of the result.
kernel void group_attention_merge() {
    uint dim = thread_position_in_grid.x, head = thread_position_in_grid.y, slot = thread_position_in_grid.z;
    if (dim >= D || head >= uint(own_peaks_shape[2])) return;
    uint heads = own_peaks_shape[2];
    size_t at = size_t(FULL ? slot : uint(places[slot])) * heads + head, own_at = size_t(slot) * heads + head;
    size_t step = size_t(peaks_shape[1]) * heads, own_step = size_t(own_peaks_shape[1]) * heads;
    float highest = -1e30f, total = 0.0f, mean = 0.0f;
    for (uint i = 0; i < uint(peaks_shape[0]); i++) highest = metal::max(highest, peaks[i * step + at]);
    for (uint i = 0; i < uint(own_peaks_shape[0]); i++) highest = metal::max(highest, own_peaks[i * own_step + own_at]);
    for (uint i = 0; i < uint(peaks_shape[0]); i++) {
        float weight = metal::fast::exp2(peaks[i * step + at] - highest);
        total += sums[i * step + at] * weight;
        mean += found[(i * step + at) * D + dim] * weight;
    }
    for (uint i = 0; i < uint(own_peaks_shape[0]); i++) {
        float weight = metal::fast::exp2(own_peaks[i * own_step + own_at] - highest);
        total += own_sums[i * own_step + own_at] * weight;
        mean += own_found[(i * own_step + own_at) * D + dim] * weight;
    }
    out[own_at * D + dim] = static_cast<T>(mean / total);
}
