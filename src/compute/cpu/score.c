/* score: one task per token; its logits go through score_block in blocks that stay in the first level cache.
 */
#include "cpu.h"
#include "qc_math.h"

typedef struct score_job {
    const qc_kern *kern;
    qc_score *scores;
    const float *a, *b;
    int64_t ld;
    const int32_t *targets;
    int64_t vocab0, n_vocab;
    float softcap;
} score_job;

static void score_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const score_job *j = ctx;
    qc_score *s = &j->scores[task];
    int64_t target = j->targets[task] - j->vocab0; /* within this slice if 0 .. n_vocab - 1 */
    float capped_a[QC_SCORE_BLOCK], capped_b[QC_SCORE_BLOCK];
    for (int64_t i = 0; i < j->n_vocab; i += QC_SCORE_BLOCK) {
        int64_t n = qc_min_i64(QC_SCORE_BLOCK, j->n_vocab - i);
        const float *a = j->a + task * j->ld + i, *b = j->b ? j->b + task * j->ld + i : NULL;
        if (j->softcap > 0) {
            j->kern->softcap(capped_a, a, j->softcap, n);
            a = capped_a;
            if (b) {
                j->kern->softcap(capped_b, b, j->softcap, n);
                b = capped_b;
            }
        }
        j->kern->score_block(s, a, b, n, (int32_t)(j->vocab0 + i));
        if (target >= i && target < i + n) {
            s->target_a = a[target - i];
            if (b)
                s->target_b = b[target - i];
        }
    }
}

int qc_cpu_score(qc_backend *be, qc_score *scores, const float *logits_a, const float *logits_b, int64_t ld,
                 const int32_t *targets, int64_t n_tokens, int64_t vocab0, int64_t n_vocab, float softcap,
                 qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    score_job j = {.kern = &cb->kern,
                   .scores = scores,
                   .a = logits_a,
                   .b = logits_b,
                   .ld = ld,
                   .targets = targets,
                   .vocab0 = vocab0,
                   .n_vocab = n_vocab,
                   .softcap = softcap};
    qc_pool_run(cb->pool, n_tokens, score_task, &j);
    return QC_OK;
}
