kernel void row_logprobs_and_gradients() {
    #include "row.metal"
    uint id = ids[row];
    for (uint at = thread_index_in_threadgroup; at < V; at += 512) {
        float p = metal::exp((float(x[at]) / heat - peak) - log_total);
        out[size_t(row) * V + at] = static_cast<T>(((at == id ? 1.0f : 0.0f) - p) * SCALE);
    }
    if (thread_index_in_threadgroup == 0) {
        logprobs[row] = (float(x[id]) / heat - peak) - log_total;
        entropies[row] = log_total - moment / total;
    }
}
