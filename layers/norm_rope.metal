// One simdgroup a head and token; a lane holds every 32nd pair (i, i + D / 2) of the head.
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
        low[i] = pair < HALF ? float(qkv[begin + pair]) : 0.0f;
        high[i] = pair < HALF ? float(qkv[begin + pair + HALF]) : 0.0f;
        square += low[i] * low[i] + high[i] * high[i];
    }
    square = simd_sum(square);
    float scale = magnitude[0] * (NORMED ? metal::rsqrt(square / float(D) + eps[0]) : 1.0f);
    device T* out = head < H ? queries + ((size_t(row) * H + head) * length + position) * D
                             : keys + ((size_t(row) * K + head - H) * length + position) * D;
    float place = float(int(offsets[row]) + int(position));
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint pair = lane + i * 32;
        if (pair >= HALF) continue;
        float x = low[i] * scale, y = high[i] * scale;
        if (NORMED) {
            x *= head < H ? float(query_weight[pair]) : float(key_weight[pair]);
            y *= head < H ? float(query_weight[pair + HALF]) : float(key_weight[pair + HALF]);
        }
        float angle = place / periods[pair];
        float c = metal::cos(angle), s = metal::sin(angle);
        out[pair] = static_cast<T>(x * c - y * s);
        out[pair + HALF] = static_cast<T>(y * c + x * s);
    }
}
