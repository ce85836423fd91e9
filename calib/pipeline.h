/* Calibrated quantization of the decoder layers, one after the other: each layer's matrices are quantized
 * stage by stage (qkv | o | gate, up | down) from statistics of inputs that the already quantized part of the
 * model produces ("true sequential", GPTQ), then the layer's output feeds the next one. Experts come one
 * after the other, each with the inputs of the tokens that the router sends to it. Memory: the residual
 * stream, one stage's inputs, one layer's weights and one input's statistics. */
#ifndef QC_PIPELINE_H
#define QC_PIPELINE_H

#include "convert.h"
#include "corpus.h"
#include "fold.h"
#include "given_stats.h"
#include "gptq.h"
#include "journal.h"

typedef struct qc_pipeline_options {
    bool gptq; /* else RTN with statistics as column weights */
    qc_gptq_options gptq_options;
    qc_fold_options fold; /* channel scaling before a layer is rounded (its gptq is set by the pipeline) */
    bool fold_sites[QC_N_DENSE_STAGES]; /* inputs that are scaled, by the stage that reads them */
    const qc_given_stats *given; /* statistics instead of a corpus; then original_inputs is set, correct 0 */
    bool original_inputs;        /* statistics of the 16-bit stream instead of the quantized one */
    bool all_experts;      /* statistics of each expert from all tokens, wherever the router sends them */
    double shrink;         /* of correlations, 0 .. 1: qc_gptq_shrink */
    double correct;        /* share of the corrected target, 0 .. 1; above 0 the 16-bit stream runs beside */
    uint64_t memory_bytes; /* cap for the whole process, 0 = none: streams spill to scratch */
    const char *scratch_folder;
    void (*progress)(void *ctx, double fraction);
    void *progress_ctx;
} qc_pipeline_options;

/* Bytes of memory with all streams in memory, and at least; scratch bytes of the latter. corpus: not used
 * with options->given, here and below. */
void qc_pipeline_plan_bytes(const qc_convert_plan *plan, const qc_model *model, const qc_corpus *corpus,
                            const qc_pipeline_options *options, const qc_backend *be, uint64_t *ret_full,
                            uint64_t *ret_least, uint64_t *ret_scratch);

/* For forecasts. Tokens that channel scales are chosen by; whether the inputs of a stage, kept for its
 * output, go through a file though nothing is spilled. */
int64_t qc_pipeline_fold_tokens(const qc_corpus *corpus);
bool qc_pipeline_keeps_in_file(const qc_model_config *config, const qc_corpus *corpus);

/* Tokens, evenly spaced over the text, that stand in where an expert has too few of its own: at most. */
enum { QC_EXPERT_SAMPLE_TOKENS = 4096 };

/* Quantize the matrices of all layers that the plan wants quantized, into the journal; layers that it has
 * already are only run through (with given statistics nothing is: only weights are read). The journal gets,
 * per layer, the codes under the tensors' names and a qc_layer_record as text under qc_pipeline_record_name.
 * QC_E_INPUT: a value that is not finite (layer and input named). */
int qc_pipeline_run(const qc_convert_plan *plan, const qc_model *model, qc_backend *be,
                    const qc_corpus *corpus, const qc_pipeline_options *options, qc_journal *journal,
                    qc_err *err) QC_WARN_UNUSED;

/* "layer.N"; cut to cap_bytes. */
void qc_pipeline_record_name(int layer, char *ret, size_t cap_bytes);

#endif
