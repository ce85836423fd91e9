#include "label_stats.h"

#include "qc_dist.h"

#include <math.h>

static double macro_f1(const int32_t *answers, const int32_t *labels, int64_t n, int n_classes)
{
    double sum = 0;
    for (int c = 0; c < n_classes; c++) {
        int64_t both = 0, either = 0;
        for (int64_t i = 0; i < n; i++) {
            both += answers[i] == c && labels[i] == c;
            either += (answers[i] == c) + (labels[i] == c);
        }
        sum += either ? 2 * (double)both / (double)either : 0;
    }
    return n_classes ? sum / n_classes : NAN;
}

qc_label_score qc_label_score_of(const int32_t *answers, const int32_t *labels, int64_t n, int n_classes)
{
    int64_t right = 0;
    for (int64_t i = 0; i < n; i++)
        right += answers[i] == labels[i];
    double p = (double)right / (double)n;
    return (qc_label_score){.accuracy = p,
                            .accuracy_se = n > 1 ? sqrt(p * (1 - p) / (double)(n - 1)) : NAN,
                            .macro_f1 = macro_f1(answers, labels, n, n_classes)};
}

/* The interval is Wald's with half a pair added to each of the four cells (Agresti & Min 2005), which keeps
 * its level where few items change. */
qc_label_pair qc_label_pair_of(const int32_t *answers, const int32_t *reference, const int32_t *labels,
                               int64_t n)
{
    qc_label_pair p = {0};
    for (int64_t i = 0; i < n; i++) {
        bool a = reference[i] == labels[i], b = answers[i] == labels[i];
        p.lost += a && !b;
        p.won += b && !a;
        p.changed += answers[i] != reference[i];
    }
    double all = (double)n + 2, lost = (double)p.lost + 0.5, won = (double)p.won + 0.5,
           middle = (won - lost) / all,
           half = 1.959963984540054 * sqrt((won + lost) - (won - lost) * (won - lost) / all) / all;
    p.delta = (double)(p.won - p.lost) / (double)n;
    p.low = middle - half;
    p.high = middle + half;
    p.mcnemar_p = qc_mcnemar_p(p.lost, p.won);
    return p;
}
