kernel void log_softmax() {
    #include "row.metal"
    for (uint at = thread_index_in_threadgroup; at < V; at += 512) {
        out[size_t(row) * V + at] = (float(x[at]) / heat - peak) - log_total;
    }
}
