// Each row has one threadgroup of 256 threads. A thread holds every 256th element.
kernel void add_norm() {
    constexpr int HELD = (C + 255) / 256;
    threadgroup float squares[8];
    uint thread_index = thread_index_in_threadgroup;
    size_t begin = size_t(threadgroup_position_in_grid.x) * C;
    float held[HELD];
    float square = 0.0f;
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint column = thread_index + i * 256;
        held[i] = 0.0f;
        if (column < C) {
            T sum = static_cast<T>(float(x[begin + column]) + float(delta[begin + column]));
            total[begin + column] = sum;
            held[i] = float(sum);  // the rounded sum is normalized, because the next layer adds to the rounded sum
        }
        square += held[i] * held[i];
    }
    square = simd_sum(square);
    if (thread_index_in_simdgroup == 0) squares[simdgroup_index_in_threadgroup] = square;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    square = 0.0f;
    for (int i = 0; i < 8; i++) square += squares[i];
    float scale = metal::rsqrt(square / float(C) + eps[0]);
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint column = thread_index + i * 256;
        if (column < C) normed[begin + column] = static_cast<T>(held[i] * scale * float(weight[column]));
    }
}
