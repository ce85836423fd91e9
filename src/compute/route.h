/* The choice of experts for one token, on the host: what every backend's `route` does. */
#ifndef QC_ROUTE_H
#define QC_ROUTE_H

#include <stdbool.h>
#include <stdint.h>

/* ids and weights [n_chosen] from logits[n_experts], as the operation of backend.h says; 1 <= n_chosen <=
 * n_experts. Compared are logits, not probabilities: rounding makes none equal that are not. A NaN is never
 * the larger one, and makes the weights NaN. */
void qc_route_token(int32_t *ids, float *weights, const float *logits, int64_t n_experts, int64_t n_chosen,
                    bool renormalise);

#endif
