// One threadgroup of 8 simdgroups for BLOCK of the queries that read a row's kv head, and a piece of its columns,
// of which a simdgroup takes 32 at a time. Scores: 8 lanes a column, each with EACH dims of its key, by fours;
// queries lie in threadgroup memory. Results: column after column, of which a lane takes OWN dims for all queries.
kernel void group_attention() {
    constexpr int EACH = (D + 31) / 32 * 4, OWN = (D + 31) / 32, WIDE = 8 * EACH, ROW = 36;  // 4 more: no bank twice
    constexpr int FEW = 8 / BLOCK, MANY = 32 / BLOCK;  // lanes that hold the score of a query, and its weights
    constexpr bool EXACT = D % 32 == 0;
    constexpr int SPACE = 8 * ROW;
    constexpr float LOW = -1e30f;  // finite: nothing less nothing must be nothing
    threadgroup float4 scaled[BLOCK * WIDE / 4];
    threadgroup float4 quads[8 * SPACE / 4];  // of each simdgroup: its scores, then weights, at last a query's results
    threadgroup float tops[8 * BLOCK];
    threadgroup float totals[8 * BLOCK];
    threadgroup float* parts = (threadgroup float*)quads + simdgroup_index_in_threadgroup * SPACE;
    int head = threadgroup_position_in_grid.y, num_heads = keys_shape[1], thread_index = thread_index_in_threadgroup;
    int simd = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    int group = FULL ? queries_shape[0] / keys_shape[0] : members_shape[1];
    int num_blocks = (group * Q + BLOCK - 1) / BLOCK;
    int row = int(threadgroup_position_in_grid.z) / num_blocks;
    int first = int(threadgroup_position_in_grid.z) % num_blocks * BLOCK;  // query of the row's
    int begin = int(threadgroup_position_in_grid.x) * int(columns[0]);
    int end = metal::min(begin + int(columns[0]), int(keys_shape[2]));

    bool is_read = false;
    for (int at = first / Q; at <= (first + BLOCK - 1) / Q && at < group; at++) {
        is_read |= FULL || int(places[int(members[row * group + at])]) == row * group + at;
    }
    for (int at = thread_index; at < BLOCK * WIDE; at += 256) {
        int query = first + at / WIDE, dim = at % WIDE;
        float x = 0.0f;
        if (query < group * Q && dim < D) {
            int entry = row * group + query / Q;
            int slot = FULL ? entry : int(members[entry]);
            x = float(queries[slot * queries_strides[0] + (head * Q + query % Q) * queries_strides[1] + dim]);
        }
        ((threadgroup float*)scaled)[at] = x * (metal::rsqrt(float(D)) * 1.44269504f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    int column = lane / 8, key_dim = lane % 8 * 4, query = lane / MANY;
    int score_row = lane % FEW * BLOCK + lane % 8 / FEW;  // where several lanes have the same score, each has a row
    float result[BLOCK * OWN], peak = LOW, sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < BLOCK * OWN; i++) result[i] = 0.0f;
    int key_dims[EACH], dims[OWN];  // past the last dim that one is read, which counts for nothing
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        int dim = key_dim + i / 4 * 32 + i % 4;
        key_dims[i] = EXACT ? dim - key_dim : dim < D ? dim : D - 1;
    }
    #pragma unroll
    for (int i = 0; i < OWN; i++) dims[i] = EXACT ? i : lane * OWN + i < D ? lane * OWN + i : D - 1;
    auto key_row = keys + row * keys_strides[0] + head * keys_strides[1] + (EXACT ? key_dim : 0);
    auto value_row = values + row * values_strides[0] + head * values_strides[1] + (EXACT ? lane * OWN : 0);
    for (int from = is_read ? begin + simd * 32 : end; from < end; from += 256) {
        #pragma unroll 1
        for (int at = 0; at < 32; at += 8) {
            simdgroup_barrier(mem_flags::mem_threadgroup);  // and so all queries are not held in registers at once
            float held[2 * EACH], score[2 * BLOCK];
            #pragma unroll
            for (int turn = 0; turn < 2; turn++) {
                auto key = key_row + metal::min(from + at + turn * 4 + column, end - 1) * keys_strides[2];
                #pragma unroll
                for (int i = 0; i < EACH; i++) held[turn * EACH + i] = float(key[key_dims[i]]);
            }
            #pragma unroll
            for (int q = 0; q < BLOCK; q++) {
                score[q] = score[BLOCK + q] = 0.0f;
                #pragma unroll
                for (int i = 0; i < EACH; i += 4) {
                    float4 x = scaled[q * (WIDE / 4) + lane % 8 + i * 2];
                    #pragma unroll
                    for (int turn = 0; turn < 2; turn++) {
                        score[turn * BLOCK + q] += x.x * held[turn * EACH + i];
                        score[turn * BLOCK + q] += x.y * held[turn * EACH + i + 1];
                        score[turn * BLOCK + q] += x.z * held[turn * EACH + i + 2];
                        score[turn * BLOCK + q] += x.w * held[turn * EACH + i + 3];
                    }
                }
            }
            #pragma unroll
            for (int turn = 0; turn < 2; turn++) {
                #pragma unroll
                for (int step = 4; step > 0; step /= 2) {  // a lane keeps half of the queries, and adds another's
                    int left = step / FEW;
                    if (left == 0) score[turn * BLOCK] += simd_shuffle_xor(score[turn * BLOCK], step);
                    #pragma unroll
                    for (int q = 0; q < left; q++) {
                        float low = score[turn * BLOCK + q], high = score[turn * BLOCK + q + left];
                        float given = lane & step ? low : high;
                        score[turn * BLOCK + q] = (lane & step ? high : low) + simd_shuffle_xor(given, step);
                    }
                }
                int place = at + turn * 4 + column;
                bool seen = from + place < end;
                if (MASKED) seen &= mask[row * mask_strides[0] + metal::min(from + place, end - 1) * mask_strides[3]];
                parts[score_row * ROW + place] = seen ? score[turn * BLOCK] : LOW;
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float weights[BLOCK], higher = peak;  // of a query and every MANYth column
        #pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            weights[i] = parts[query * ROW + i * MANY + lane % MANY];
            higher = metal::max(higher, weights[i]);
        }
        #pragma unroll
        for (int other = MANY / 2; other > 0; other /= 2) higher = metal::max(higher, simd_shuffle_xor(higher, other));
        float shrink = metal::fast::exp2(peak - higher);
        peak = higher;
        sum *= shrink;
        #pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            weights[i] = metal::fast::exp2(weights[i] - higher);
            sum += weights[i];
            parts[query * ROW + i * MANY + lane % MANY] = weights[i];
        }
        #pragma unroll
        for (int q = 0; q < BLOCK; q++) {
            float other = simd_broadcast(shrink, q * MANY);
            #pragma unroll
            for (int i = 0; i < OWN; i++) result[q * OWN + i] *= other;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll 1
        for (int quad = 0; quad < 8; quad++) {
            float held[4 * OWN];
            #pragma unroll
            for (int turn = 0; turn < 4; turn++) {
                auto value = value_row + metal::min(from + quad * 4 + turn, end - 1) * values_strides[2];
                #pragma unroll
                for (int i = 0; i < OWN; i++) held[turn * OWN + i] = float(value[dims[i]]);
            }
            #pragma unroll
            for (int q = 0; q < BLOCK; q++) {
                float4 weight = quads[simd * (SPACE / 4) + q * (ROW / 4) + quad];
                #pragma unroll
                for (int i = 0; i < OWN; i++) {
                    result[q * OWN + i] += weight.x * held[i];
                    result[q * OWN + i] += weight.y * held[OWN + i];
                    result[q * OWN + i] += weight.z * held[2 * OWN + i];
                    result[q * OWN + i] += weight.w * held[3 * OWN + i];
                }
            }
        }
    }
    #pragma unroll
    for (int other = MANY / 2; other > 0; other /= 2) sum += simd_shuffle_xor(sum, other);
    if (lane % MANY == 0) {
        tops[simd * BLOCK + query] = peak;
        totals[simd * BLOCK + query] = sum;
    }
    size_t out = (size_t(threadgroup_position_in_grid.x) * keys_shape[0] + row) * group;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (int q = 0; q < BLOCK; q++) {
        #pragma unroll
        for (int i = 0; i < OWN; i++) parts[lane * OWN + i] = result[q * OWN + i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float highest = LOW, total = 0.0f, mean = 0.0f;
        for (int i = 0; i < 8; i++) highest = metal::max(highest, tops[i * BLOCK + q]);
        for (int i = 0; i < 8; i++) {
            float weight = metal::fast::exp2(tops[i * BLOCK + q] - highest);
            total += totals[i * BLOCK + q] * weight;
            if (thread_index < D) mean += ((threadgroup float*)quads)[i * SPACE + thread_index] * weight;
        }
        size_t at = ((out + (first + q) / Q) * num_heads + head) * Q + (first + q) % Q;
        if (first + q < group * Q) {
            if (thread_index < D) found[at * D + thread_index] = mean;
            if (thread_index == 0) {
                peaks[at] = highest;
                sums[at] = total;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
