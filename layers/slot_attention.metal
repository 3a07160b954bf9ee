// Each kv head of each slot has one threadgroup of 8 simdgroups, which reads first the prompt's columns and then the
// slot's own. LANES lanes share a column, so a simdgroup reads COLUMNS of them at once. A lane holds EACH dims, in
// groups of four, of the Q queries that share the kv head and of their results. Weights are relative to a maximum that
// the lanes of a column keep, and raise at most once in TURNS columns; all results are combined at the end. Lanes past
// the last column read the last column with weight 0.
kernel void slot_attention() {
    constexpr int EACH = (D + 4 * LANES - 1) / (4 * LANES) * 4, COLUMNS = 32 / LANES, STEP = 8 * COLUMNS;
    constexpr int TURNS = COLUMNS == 4 ? 2 : 4;
    constexpr bool EXACT = EACH * LANES == D;
    constexpr float LOW = -1e30f;  // finite, because -inf minus -inf would be nan
    threadgroup float parts[8 * EACH * LANES];
    threadgroup float peaks[8];
    threadgroup float sums[8];
    int slot = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
    int simd = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    int column = lane / LANES, begin = lane % LANES * 4;
    int group = FULL ? queries_shape[0] / keys_shape[0] : members_shape[1];
    int prompt = (FULL ? slot : int(places[slot])) / group;
    int num_shared = keys_shape[2], num_own = own_keys_shape[2];
    auto mask_begin = prompt * mask_strides[0], own_begin = slot * own_mask_strides[0];

    int dims[EACH];  // of a row; lanes past the last dim read that one, which their queries of 0 make count for nothing
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        int dim = begin + i / 4 * (4 * LANES) + i % 4;
        dims[i] = EXACT ? dim - begin : dim < D ? dim : D - 1;
    }
    float query[Q * EACH], result[Q * EACH], peak[Q], sum[Q];
    #pragma unroll
    for (int q = 0; q < Q; q++) {
        peak[q] = LOW;
        sum[q] = 0.0f;
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            int dim = begin + i / 4 * (4 * LANES) + i % 4;
            auto at = slot * queries_strides[0] + (head * Q + q) * queries_strides[1] + dim;
            query[q * EACH + i] = dim < D ? float(queries[at]) * (metal::rsqrt(float(D)) * 1.44269504f) : 0.0f;
            result[q * EACH + i] = 0.0f;
        }
    }
    for (int part = 0; part < 2; part++) {
        int last = (part ? num_own : num_shared) - 1;
        int64_t key_step = part ? own_keys_strides[2] : keys_strides[2];
        int64_t value_step = part ? own_values_strides[2] : values_strides[2];
        auto key = part ? own_keys + slot * own_keys_strides[0] + head * own_keys_strides[1]
                        : keys + prompt * keys_strides[0] + head * keys_strides[1];
        auto value = part ? own_values + slot * own_values_strides[0] + head * own_values_strides[1]
                          : values + prompt * values_strides[0] + head * values_strides[1];
        key += EXACT ? begin : 0;
        value += EXACT ? begin : 0;
        auto last_key = key + last * key_step, last_value = value + last * value_step;
        int place = simd * COLUMNS + column;
        key += place * key_step;
        value += place * value_step;
        key_step *= STEP;
        value_step *= STEP;
        for (int from = simd * COLUMNS; from <= last; from += TURNS * STEP) {
            float score[Q * TURNS], held[EACH];
            #pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                int at = place + turn * STEP;
                bool seen = at <= last;
                auto row = seen ? key : last_key;
                key += key_step;
                if (MASKED) seen &= part | mask[mask_begin + metal::min(at, num_shared - 1) * mask_strides[3]];
                if (OWN_MASKED) seen &= !part | own_mask[own_begin + metal::min(at, num_own - 1) * own_mask_strides[3]];
                #pragma unroll
                for (int i = 0; i < EACH; i++) held[i] = float(row[dims[i]]);
                #pragma unroll
                for (int q = 0; q < Q; q++) {
                    float found = query[q * EACH] * held[0];
                    #pragma unroll
                    for (int i = 1; i < EACH; i++) found += query[q * EACH + i] * held[i];
                    #pragma unroll
                    for (int other = LANES / 2; other > 0; other /= 2) found += simd_shuffle_xor(found, other);
                    score[q * TURNS + turn] = seen ? found : LOW;
                }
            }
            #pragma unroll
            for (int q = 0; q < Q; q++) {
                float higher = peak[q];
                #pragma unroll
                for (int turn = 0; turn < TURNS; turn++) higher = metal::max(higher, score[q * TURNS + turn]);
                float shrink = metal::fast::exp2(peak[q] - higher);
                peak[q] = higher;
                sum[q] *= shrink;
                #pragma unroll
                for (int turn = 0; turn < TURNS; turn++) {
                    score[q * TURNS + turn] = metal::fast::exp2(score[q * TURNS + turn] - higher);
                    sum[q] += score[q * TURNS + turn];
                }
                #pragma unroll
                for (int i = 0; i < EACH; i++) result[q * EACH + i] *= shrink;
            }
            #pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                auto row = place + turn * STEP <= last ? value : last_value;
                value += value_step;
                #pragma unroll
                for (int i = 0; i < EACH; i++) held[i] = float(row[dims[i]]);
                #pragma unroll
                for (int q = 0; q < Q; q++) {
                    #pragma unroll
                    for (int i = 0; i < EACH; i++) result[q * EACH + i] += score[q * TURNS + turn] * held[i];
                }
            }
            place += TURNS * STEP;
        }
    }
    #pragma unroll
    for (int q = 0; q < Q; q++) {  // what a simdgroup's columns found under a common maximum, then what simdgroups did
        float highest = peak[q];
        #pragma unroll
        for (int other = LANES; other < 32; other *= 2) highest = metal::max(highest, simd_shuffle_xor(highest, other));
        float shrink = metal::fast::exp2(peak[q] - highest), total = sum[q] * shrink;
        #pragma unroll
        for (int other = LANES; other < 32; other *= 2) total += simd_shuffle_xor(total, other);
        if (lane == 0) {
            peaks[simd] = highest;
            sums[simd] = total;
        }
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            float found = result[q * EACH + i] * shrink;
            #pragma unroll
            for (int other = LANES; other < 32; other *= 2) found += simd_shuffle_xor(found, other);
            if (column == 0) parts[simd * EACH * LANES + begin + i / 4 * (4 * LANES) + i % 4] = found;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        highest = LOW, total = 0.0f;
        float mean = 0.0f;
        int dim = thread_index_in_threadgroup;
        for (int i = 0; i < 8; i++) highest = metal::max(highest, peaks[i]);
        for (int i = 0; i < 8; i++) {
            float weight = metal::fast::exp2(peaks[i] - highest);
            total += sums[i] * weight;
            if (dim < D) mean += parts[i * EACH * LANES + dim] * weight;
        }
        if (dim < D) out[((size_t(slot) * own_keys_shape[1] + head) * Q + q) * D + dim] = static_cast<T>(mean / total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
