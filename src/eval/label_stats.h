/* Statistics of label tasks. Answers and labels are numbers of choices, one per item. */
#ifndef QC_EVAL_LABEL_STATS_H
#define QC_EVAL_LABEL_STATS_H

#include "qc_result.h"

/* n_classes 0: choices differ from item to item, so that there is no F1. A class that is neither answered nor
 * right anywhere counts 0 in macro F1. */
qc_label_score qc_label_score_of(const int32_t *answers, const int32_t *labels, int64_t n, int n_classes);

/* The model against the reference on the same items. */
qc_label_pair qc_label_pair_of(const int32_t *answers, const int32_t *reference, const int32_t *labels,
                               int64_t n);

#endif
