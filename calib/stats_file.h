/* Statistics file: what one pass of the 16-bit model over a calibration corpus says about the inputs of every
 * matrix, for many recipes to use. Per layer and stage, of an expert's stages per expert: the sums of
 * hessian.h as parts of their tree, max |x| and the number of tokens. Layout: docs/formats/statistics.md. */
#ifndef QC_STATS_FILE_H
#define QC_STATS_FILE_H

#include "corpus.h"
#include "hessian.h"
#include "model.h"

#include <stdbool.h>
#include <stdint.h>

#define QC_STATS_MAX_LAYERS  4096
#define QC_STATS_MAX_EXPERTS 4096

/* What the statistics are of. Shards of one corpus differ in first_window and n_windows alone. */
typedef struct qc_stats_info {
    char model_sha256[65];            /* qc_stats_model_sha256 */
    char family[64];                  /* model_type of the config */
    int64_t n_layers;                 /* decoder layers, 1 .. QC_STATS_MAX_LAYERS */
    int64_t n_experts;                /* of the layers that have some, 0 .. QC_STATS_MAX_EXPERTS */
    bool sparse[QC_STATS_MAX_LAYERS]; /* by layer: experts take the place of gate_up and down */
    int64_t widths[QC_N_STAGES];      /* inputs of each stage's matrices; without experts 0 for theirs */
    char text[256];                   /* name of the corpus file, for people */
    char ids_sha256[65];              /* of all windows of the corpus */
    int64_t corpus_windows;           /* of the whole corpus */
    int64_t length;                   /* tokens of a window */
    int64_t first_window, n_windows;  /* of this file: all, or those of a shard */
    char compute[8];                  /* "f32" or "bf16" */
} qc_stats_info;

/* An input of the model. */
typedef struct qc_stats_place {
    int layer;
    qc_stage stage;
    int64_t expert; /* 0 unless the stage is one of an expert */
} qc_stats_place;

/* Number of inputs, in the order of the file: layer by layer, stages in their order, those of experts
 * together for each expert. Place of number k. */
int64_t qc_stats_n_places(const qc_stats_info *info);
qc_stats_place qc_stats_place_at(const qc_stats_info *info, int64_t k);

/* Describe the whole corpus for a model (with qc_stats_model_sha256); path: of the corpus, its last component
 * is kept. */
int qc_stats_describe(const qc_model *model, const qc_corpus *corpus, const char *path, qc_compute compute,
                      qc_stats_info *ret, qc_err *err) QC_WARN_UNUSED;

/* One hash for all weight files of a source: SHA-256 of their SHA-256 digests in order. */
int qc_stats_model_sha256(const qc_source *src, char ret_hex[65], qc_err *err) QC_WARN_UNUSED;
/* The same from the digests of its files. */
int qc_stats_model_sha256_of(const char (*digests)[65], int64_t n, char ret_hex[65],
                             qc_err *err) QC_WARN_UNUSED;

/* ---- reading ---- */

typedef struct qc_stats_file qc_stats_file;

/* Open a file and check its header and that every record is there and as long as it should be. QC_E_INPUT: no
 * statistics file, cut, damaged; QC_E_UNSUPPORTED: a version of a later program. Close with qc_stats_close.
 */
int qc_stats_open(const char *path, qc_stats_file **ret, qc_err *err) QC_WARN_UNUSED;
/* NULL is fine. */
void qc_stats_close(qc_stats_file *file);

/* What the file says it holds; valid until close. */
const qc_stats_info *qc_stats_of(const qc_stats_file *file);

/* Are the statistics those of this model, of the whole corpus? model_sha256: of its source, NULL = do not
 * compare weights. QC_E_INPUT names what differs. */
int qc_stats_check_model(const qc_stats_file *file, const qc_model *model, const char *model_sha256,
                         qc_err *err) QC_WARN_UNUSED;

/* Start sums of an input, at the block where those of a file of this kind begin. */
int qc_stats_init(const qc_stats_info *info, qc_stats_place place, qc_backend *be, qc_hessian *hs,
                  qc_err *err) QC_WARN_UNUSED;

/* Put the sums of an input behind those that hs (started by qc_stats_init) holds; finish then gives H.
 * QC_E_INPUT: damaged, or blocks that do not follow. */
int qc_stats_append(const qc_stats_file *file, qc_stats_place place, qc_hessian *hs,
                    qc_err *err) QC_WARN_UNUSED;

/* Sums of an input without H: sum_sq[width] = sum of x^2 (the diagonal of H), sum |x|, max |x| (host memory,
 * each may be NULL) and the number of tokens. */
int qc_stats_summary(const qc_stats_file *file, qc_backend *be, qc_stats_place place, float *sum_sq,
                     float *sum_abs, float *max_abs, int64_t *ret_tokens, qc_err *err) QC_WARN_UNUSED;

/* weights[width] = mean of x^2 over all tokens, with 1e-6 of their mean as the least (a column that never saw
 * a value is not free), or all 1 if everything is 0: column weights of a scale search. */
int qc_stats_column_weights(const qc_stats_file *file, qc_backend *be, qc_stats_place place, float *weights,
                            qc_err *err) QC_WARN_UNUSED;

/* The same rule for sums of squares from elsewhere: sum_sq[n] over n_tokens > 0 tokens. */
void qc_stats_weights_of_sums(const float *sum_sq, int64_t n, double n_tokens, float *weights);

/* ---- writing ---- */

typedef struct qc_stats_writer qc_stats_writer;

/* Start a file that becomes `path` when it is committed. All inputs follow in order. */
int qc_stats_create(const char *path, bool force, const qc_stats_info *info, qc_stats_writer **ret,
                    qc_err *err) QC_WARN_UNUSED;
/* The open block of hs is closed. */
int qc_stats_put(qc_stats_writer *writer, qc_hessian *hs, qc_err *err) QC_WARN_UNUSED;
/* Both free the writer; on failure the file is removed. */
int qc_stats_commit(qc_stats_writer *writer, qc_err *err) QC_WARN_UNUSED;
void qc_stats_discard(qc_stats_writer *writer);

/* Merge shards of one corpus, given in any order, into `path`. QC_E_INPUT names two files and what differs,
 * overlaps or is missing between them. A merge of all shards has the bytes of a file made in one go. */
int qc_stats_merge(const char *const *paths, int n_paths, const char *path, bool force, qc_backend *be,
                   qc_err *err) QC_WARN_UNUSED;

/* ---- making ---- */

typedef struct qc_stats_options {
    int shard, n_shards;   /* 0-based; 0 of 1 = everything */
    uint64_t memory_bytes; /* cap for the whole process, 0 = none: the residual stream spills to scratch */
    const char *scratch_folder;
    void (*progress)(void *ctx, double fraction);
    void *progress_ctx;
} qc_stats_options;

/* Fill first_window and n_windows of *info for a shard. Shards are cut between blocks of QC_HESSIAN_BLOCK
 * tokens, so their number is limited: QC_E_USAGE. */
int qc_stats_shard(const qc_corpus *corpus, const qc_stats_options *options, qc_stats_info *info,
                   qc_err *err) QC_WARN_UNUSED;

/* Run the windows of info through the layers and write the sums. QC_E_INPUT: an input that is not finite
 * (layer and stage named); QC_E_RESOURCE: more than the cap. */
int qc_stats_make(const qc_model *model, qc_backend *be, const qc_corpus *corpus,
                  const qc_stats_options *options, const qc_stats_info *info, qc_stats_writer *writer,
                  qc_err *err) QC_WARN_UNUSED;

#endif
