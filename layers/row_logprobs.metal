kernel void row_logprobs() {
    #include "row.metal"
    if (thread_index_in_threadgroup == 0) {
        logprobs[row] = (float(x[ids[row]]) / heat - peak) - log_total;
        entropies[row] = log_total - moment / total;
    }
}
