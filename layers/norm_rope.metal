// Each head of each token has one simdgroup. A lane holds every 32nd pair of the head's dims: first the rotated pairs
// (i, i + TURNED / 2), and after them the pairs (i, i + (D - TURNED) / 2) of the other dims.
kernel void norm_rope() {
    constexpr int HALF = D / 2;
    constexpr int HELD = (HALF + 31) / 32;
    uint lane = thread_index_in_simdgroup;
    uint head = thread_position_in_grid.y, token = threadgroup_position_in_grid.x;  // token = row * L + position
    if (head >= H + K) return;
    uint length = qkv_shape[1];
    uint row = token / length, position = token % length;
    size_t begin = (size_t(token) * (H + 2 * K) + head) * D;
    float low[HELD], high[HELD];
    float square = 0.0f;
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint pair = lane + i * 32;
        uint first = pair < TURNED / 2 ? pair : pair + TURNED / 2;
        uint second = first + (pair < TURNED / 2 ? TURNED : D - TURNED) / 2;
        low[i] = pair < HALF ? float(qkv[begin + first]) : 0.0f;
        high[i] = pair < HALF ? float(qkv[begin + second]) : 0.0f;
        square += low[i] * low[i] + high[i] * high[i];
    }
    square = simd_sum(square);
    float scale = NORMED ? metal::rsqrt(square / float(D) + eps[0]) : 1.0f;
    device T* out = head < H ? queries + ((size_t(row) * H + head) * length + position) * D
                             : keys + ((size_t(row) * K + head - H) * length + position) * D;
    float place = float(int(offsets[row]) + int(position));
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint pair = lane + i * 32;
        if (pair >= HALF) continue;
        uint first = pair < TURNED / 2 ? pair : pair + TURNED / 2;
        uint second = first + (pair < TURNED / 2 ? TURNED : D - TURNED) / 2;
        float x = low[i] * scale, y = high[i] * scale;
        if (NORMED) {
            x *= head < H ? float(query_weight[first]) : float(key_weight[first]);
            y *= head < H ? float(query_weight[second]) : float(key_weight[second]);
        }
        float c = 1.0f, s = 0.0f;
        if (pair < TURNED / 2) {
            float angle = place / periods[pair];
            c = metal::cos(angle) * magnitude[0];
            s = metal::sin(angle) * magnitude[0];
        }
        out[first] = static_cast<T>(x * c - y * s);
        out[second] = static_cast<T>(y * c + x * s);
    }
}
