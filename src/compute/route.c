#include "route.h"

#include <math.h>

static void choose(int32_t *ids, const float *logits, int64_t n_experts, int64_t n_chosen)
{
    for (int64_t c = 0; c < n_chosen; c++) {
        int32_t best = -1;
        for (int32_t e = 0; e < (int32_t)n_experts; e++) {
            bool taken = false;
            if (best >= 0 && !(logits[e] > logits[best]))
                continue;
            for (int64_t i = 0; i < c && !taken; i++)
                taken = ids[i] == e;
            best = taken ? best : e;
        }
        ids[c] = best;
    }
}

void qc_route_token(int32_t *ids, float *weights, const float *logits, int64_t n_experts, int64_t n_chosen,
                    bool renormalise)
{
    double sum = 0;
    choose(ids, logits, n_experts, n_chosen);
    double max = (double)logits[ids[0]];
    for (int64_t i = 0; i < (renormalise ? n_chosen : n_experts); i++)
        sum += exp((double)logits[renormalise ? ids[i] : i] - max);
    for (int64_t i = 0; i < n_chosen; i++)
        weights[i] = (float)(exp((double)logits[ids[i]] - max) / sum);
}
