// Each threadgroup of 8 simdgroups computes 32 columns of `wide`, 16 columns of `thin` and ROWS rows. A simdgroup reads
// every 8th row, and a lane holds the 16 sums of its column.
kernel void transposed_product() {
    threadgroup float parts[8 * 32];
    uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    uint part = threadgroup_position_in_grid.y;
    uint column = (threadgroup_position_in_grid.x / BLOCKS) * 32 + lane;
    uint first = (threadgroup_position_in_grid.x % BLOCKS) * 16;
    uint num_rows = thin_shape[0], width = wide_shape[1];
    uint end = part * ROWS + ROWS < num_rows ? part * ROWS + ROWS : num_rows;
    bool inside = column < width;
    float held[16];
    #pragma unroll
    for (uint i = 0; i < 16; i++) held[i] = 0.0f;
    for (uint row = part * ROWS + simd; row < end; row += 8) {
        float x = inside ? float(wide[size_t(row) * width + column]) : 0.0f;
        auto factors = thin + size_t(row) * R + first;
        #pragma unroll
        for (uint i = 0; i < 16; i++) {
            if (R % 16 == 0 || first + i < R) held[i] += float(factors[i]) * x;
        }
    }
    #pragma unroll
    for (uint i = 0; i < 16; i++) {
        parts[simd * 32 + lane] = held[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd == i % 8 && inside && first + i < R) {
            float sum = 0.0f;
            for (uint other = 0; other < 8; other++) sum += parts[other * 32 + lane];
            sums[(size_t(part) * R + first + i) * width + column] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
