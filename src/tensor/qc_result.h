/* Plain results that travel from the layers that measure (quant, calib, src/eval, formats) to the one that
 * reports (src/report): events, the account of tensors, evaluations, artifacts, gates. No behaviour but list
 * handling.
 *
 * Strings in these structs are copies owned by the struct's list or, in the structs that stand alone, by
 * whoever filled them; every struct says which. A number that was not measured is NaN, a count 0. */
#ifndef QC_RESULT_H
#define QC_RESULT_H

#include "qc_dtype.h"
#include "qc_err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- events: every fallback, note and surprise of a run ---- */

typedef enum {
    QC_EVENT_NOTE = 0, /* worth knowing, the result is what was asked for: a default applied, a stray file */
    QC_EVENT_FALLBACK  /* something weaker than asked for was done: counts for gates.fallbacks and `allow` */
} qc_event_level;

typedef struct qc_event {
    char *kind;    /* snake_case id, what `allow` and a reader of the report match: "group_fallback" */
    char *subject; /* tensor, layer, file or key; "" if none */
    char *detail;  /* one line for people */
    qc_event_level level;
    int64_t count; /* >= 1; equal kind + subject + detail are counted, not repeated */
} qc_event;

/* In order of first occurrence. Zero-initialise, release with qc_event_list_clear. Not thread-safe: events
 * are added from the thread that walks the layers, so that their order is the same in every run. */
typedef struct qc_event_list {
    qc_event *events;
    int64_t n_events;
    int64_t cap_events;
} qc_event_list;

/* Add `count` (> 0) occurrences; the strings are copied, subject may be NULL. QC_E_RESOURCE when out of
 * memory. */
int qc_event_add(qc_event_list *list, qc_event_level level, const char *kind, const char *subject,
                 int64_t count, qc_err *err, const char *detail_fmt, ...) QC_WARN_UNUSED QC_PRINTF(7, 8);

/* Occurrences of one kind (NULL: of all fallbacks). */
int64_t qc_event_count(const qc_event_list *list, const char *kind);

/* Release everything and reset to empty. NULL is fine. */
void qc_event_list_clear(qc_event_list *list);

/* ---- account of tensors: each tensor of the source exactly once (design: point 5) ---- */

typedef enum {
    QC_ACTION_QUANTIZED = 0, /* put on a grid, or its codes carried over */
    QC_ACTION_COPIED,        /* stored as it is because its kind is never quantized: norms, biases */
    QC_ACTION_KEPT16, /* could have been quantized, was left in 16 bit: skip list, group rule, 16-bit override
                       */
    QC_ACTION_TIED,   /* another name of a stored tensor */
    QC_ACTION_FOLDED, /* multiplied into a neighbour */
    QC_ACTION_DROPPED /* not stored, by a named rule */
} qc_tensor_action;

/* How a matrix was rounded with statistics of its inputs. Errors are sums over rows of e H e^T. */
typedef struct qc_tensor_solve {
    const char *method; /* "rtn", "gptq"; static text */
    const char *order;  /* of columns; static text, NULL where there is none */
    double error;       /* of the stored codes */
    double error_rtn;   /* of rounding to nearest on the same grid */
    double error_norm;  /* w H w^T, to compare both with */
    double damp;        /* used, as a fraction of the mean diagonal of H */
    int64_t n_dead;     /* inputs that were 0 in all tokens */
    int64_t n_tokens;   /* that H was taken from */
    int64_t n_rtn_rows; /* rows where rounding to nearest was better and was taken */
    double seconds;     /* wall time */
} qc_tensor_solve;

typedef struct qc_tensor_account {
    char *name;
    char *rule; /* why: "linear", "embedding", "norm", "skip '*.down_proj'", "tied to
                   model.embed_tokens.weight" */
    qc_tensor_action action;
    int layer; /* -1 outside the layers */
    qc_dtype source_dtype;
    qc_dtype dtype; /* as stored; QC_DT_GRID when quantized, QC_DT_INVALID when not stored */
    int64_t n_rows, n_cols;
    int bits; /* of the stored values, scales left out: 2 .. 8 on a grid, else those of the dtype; 0 when not
                 stored */
    int64_t group_elems;        /* 0 for a dense tensor */
    bool symmetric;             /* of a grid */
    bool searched;              /* scales were searched, not plain min-max */
    bool carried;               /* codes and scales are those of the source, bit for bit; errors are then 0 */
    uint64_t bytes_in;          /* in the source */
    uint64_t bytes_out;         /* in the artifact, scales and padding included; 0 when not stored */
    double sq_error, sq_weight; /* sum h (w - w')^2 and sum h w^2 of the stored grid */
    /* Sum (w - w')^2 without weights, w those of the checkpoint: of the codes as they were given to the
     * writer, and of the bytes of the artifact as its reader decodes them. NaN: not computed, not read back.
     */
    double sq_stored, sq_read;
    double sq_source;       /* sum w^2 of the checkpoint */
    double sq_error_minmax; /* the same sum for min-max scales on the same grid; NaN if not computed */
    int64_t n_clipped, n_zero_groups, n_small_scale; /* as in qc_quant_stats */
    qc_tensor_solve solve; /* method NULL for a tensor that was rounded without calibration */
} qc_tensor_account;

/* Wall seconds that a calibrated layer took, by kind of work. */
typedef struct qc_layer_times {
    double forward, hessian, factor, solve, fold, pack, io;
} qc_layer_times;

/* In the order of the source. Zero-initialise, release with qc_account_list_clear. */
typedef struct qc_account_list {
    qc_tensor_account *tensors;
    int64_t n_tensors;
    int64_t cap_tensors;
    qc_layer_times *layer_times; /* [n_layer_times], layers 0 .. of a calibrated run */
    int64_t n_layer_times;
} qc_account_list;

/* Append a copy of *tensor (its two strings are copied; rule may be NULL). QC_E_RESOURCE when out of memory.
 */
int qc_account_add(qc_account_list *list, const qc_tensor_account *tensor, qc_err *err) QC_WARN_UNUSED;

/* Append the times of the next layer. */
int qc_account_add_layer(qc_account_list *list, const qc_layer_times *times, qc_err *err) QC_WARN_UNUSED;

/* Sum of bytes_in / bytes_out over all tensors; either pointer may be NULL. */
void qc_account_bytes(const qc_account_list *list, uint64_t *ret_bytes_in, uint64_t *ret_bytes_out);

/* Relative difference of two relative squared errors, `stored` that of the account. Below 1e-9, which no grid
 * reaches, they differ by the rounding of decoders alone: such an error counts as that. */
double qc_error_difference(double read, double stored);

/* Largest difference of a tensor's sq_read and sq_stored, each as a fraction of sq_source; NaN if none was
 * read back. */
double qc_account_error(const qc_account_list *list);

/* Release everything and reset to empty. NULL is fine. */
void qc_account_list_clear(qc_account_list *list);

/* "quantized", "copied", "kept16", "tied", "folded", "dropped". */
const char *qc_action_name(qc_tensor_action action);

/* ---- evaluation: one model alone, or against a reference over the same windows ---- */

/* One window of an evaluation; sums over its scored tokens, in token order. */
typedef struct qc_window_result {
    int64_t tokens_scored;
    double nll, nll_reference; /* sums of -ln p(target), nats; the reference's NaN without one */
    double kld;                /* sum of KL(reference || model), nats; NaN without a reference */
    int64_t top1_agree;        /* tokens whose most likely id is the reference's */
} qc_window_result;

/* Percentiles at which distributions are reported: minimum, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9,
 * maximum. */
#define QC_N_PERCENTS 13
extern const double qc_percents[QC_N_PERCENTS];

/* Bins of the histogram of KL divergences: four per factor of ten from 10^QC_KLD_LOG10_FROM. The first takes
 * all that is smaller, the last all that is larger. */
#define QC_KLD_LOG10_FROM (-9.0)
#define QC_KLD_LOG10_STEP 0.25
#define QC_N_KLD_BINS     44

/* Values of one quantity over the scored tokens. */
typedef struct qc_spread {
    double mean;
    double se;        /* of the mean: the larger of the plain and the window-clustered standard error */
    double low, high; /* 95 % interval of the mean, Student's t over windows; NaN with one window */
    double at[QC_N_PERCENTS]; /* qc_percents, by linear interpolation between order statistics */
} qc_spread;

/* Scored tokens of one range of places in their windows; means, as in qc_evaluation. */
typedef struct qc_place_result {
    int64_t first, last; /* places of the scored tokens in the window, both inclusive */
    int64_t tokens_scored;
    double nll, nll_reference, kld, top1;
} qc_place_result;

/* One gate of a sequential decision (docs/methods/decide.md). Strings are static. */
typedef struct qc_decision {
    const char *gate;
    double limit;
    double value;        /* mean over the windows at its last look, in the unit of the gate */
    double statistic;    /* distance from the limit over the standard error; positive: inside */
    double boundary;     /* of that look: decided where |statistic| reaches it */
    int64_t windows;     /* at that look */
    const char *outcome; /* "pass", "fail", "undecided" */
} qc_decision;

/* The reference against itself under other arithmetic: differences of this size mean nothing. */
typedef struct qc_noise_floor {
    int64_t windows; /* 0: not measured */
    int threads, other_threads;
    double threads_kld_max; /* the same arithmetic, other_threads in place of threads; 0: the same bits */
    const char *compute, *other_compute;       /* "f32", "bf16"; static */
    double kld_mean, kld_p99, delta_nll, top1; /* other_compute against compute */
} qc_noise_floor;

/* Names as in the report (nats, fractions). Without a reference ppl_reference .. top1 are NaN. */
typedef struct qc_evaluation {
    char *protocol;  /* "gptq", "llama", "full"; owned */
    char *text;      /* name of the scored text or id file, for people; owned, may be NULL */
    char *reference; /* file of a stored reference; owned, NULL if the reference was run or there was none */
    int64_t windows;
    int64_t length; /* tokens per window */
    int64_t stride; /* tokens from one window's start to the next's; = length when they do not overlap */
    char text_sha256[65]; /* of the text's file; "" if there is none */
    bool bos;             /* whether a BOS was put in front */
    bool plain_special;   /* text that spells a special token was ordinary text */
    int64_t special_ids;  /* special ids found in the text */
    int64_t tokens_text;  /* tokens of the whole text */
    int64_t tokens_scored;
    char ids_sha256[65]; /* over the scored windows' ids as little-endian int32; "" if not computed */
    double nll_mean;     /* mean over tokens, = ln ppl */
    double ppl, ppl_reference;
    double ppl_se, ppl_reference_se, ppl_ratio_se; /* from those of the NLL, by the derivative of exp */
    double ppl_ratio;                              /* ppl / ppl_reference */
    double nll_correlation;                        /* of the two NLL over tokens */
    double delta_nll;                              /* mean of nll - nll_reference = ln ppl_ratio */
    double delta_nll_se; /* the larger of the plain and the window-clustered standard error */
    double delta_nll_low, delta_nll_high; /* 95 % interval, Student's t over windows; NaN with one window */
    double kld_mean, kld_p99, kld_max;
    qc_spread kld;     /* KL(reference || model) */
    qc_spread delta_p; /* p(target) of the model minus that of the reference */
    double delta_p_rms, delta_p_rms_se;
    double top1, top1_se;
    double flips;                 /* share of tokens that one of the two has on top and the other has not */
    double flips_lost, flips_won; /* had by the reference alone; by the model alone */
    double seconds;               /* wall time of the walk; reported under timings, never inside evaluation */
    qc_window_result *per_window; /* [windows], owned; NULL if not kept */
    qc_place_result *per_place;   /* [n_places], owned; NULL if not kept */
    int64_t n_places;
    qc_decision *decisions; /* [n_decisions], owned; NULL unless decided window by window */
    int n_decisions;
    qc_noise_floor noise;
    int64_t kld_counts[QC_N_KLD_BINS]; /* positions per bin; all 0 without a reference */
} qc_evaluation;

/* All numbers NaN, counts 0, strings NULL: what an evaluation starts from. */
void qc_evaluation_init(qc_evaluation *eval);

/* Release what it owns and init again. NULL is fine. */
void qc_evaluation_clear(qc_evaluation *eval);

/* ---- label tasks ---- */

/* Accuracy of one model by one rule. Fractions; NaN where there is no such rule. */
typedef struct qc_label_score {
    double accuracy, accuracy_se;
    double
        macro_f1; /* mean over classes of the harmonic mean of precision and recall; NaN if choices differ */
} qc_label_score;

/* The model against the reference on the same items. */
typedef struct qc_label_pair {
    int64_t lost, won;       /* items that the reference alone / the model alone gets right */
    int64_t changed;         /* items with another answer */
    double delta, low, high; /* accuracy - the reference's, and its 95 % interval (Agresti & Min 2005) */
    double mcnemar_p; /* exact, two-sided: chance of such a difference of lost and won if both are equally
                         likely */
} qc_label_pair;

typedef struct qc_label_result {
    char *task; /* owned */
    char *data; /* name of the data file; owned, may be NULL */
    char data_sha256[65];
    int64_t n_items, n_rows; /* scored; of the file */
    int64_t tokens;          /* computed, per model */
    bool has_reference, has_calibrated;
    qc_label_score model, reference;
    qc_label_score model_calibrated, reference_calibrated; /* contextual calibration */
    qc_label_pair pair, pair_calibrated;
    int64_t *rows;                        /* [n_items] row of the data file; owned, like the next three */
    int32_t *labels;                      /* [n_items] right choice */
    int32_t *answers, *answers_reference; /* [n_items] uncalibrated; the latter NULL without reference */
    int32_t *n_choices;                   /* [n_items]; owned, like the next two */
    /* [sum of n_choices] log-likelihoods of the choices as they were compared (uncalibrated), nats; the
     * latter NULL without reference. */
    double *log_p, *log_p_reference;
} qc_label_result;

/* Release what it owns. NULL is fine. */
void qc_label_result_clear(qc_label_result *result);

/* ---- calibration ---- */

/* What statistics were taken from. Strings are borrowed. */
typedef struct qc_calibration {
    const char *statistics; /* file with statistics made earlier; NULL = made in this run */
    char statistics_sha256[65];
    const char *compute;             /* of such a file: "f32", "bf16"; NULL for an importance matrix */
    const char *text;                /* name of the file; NULL for an importance matrix */
    int64_t windows, length, tokens; /* 0 for an importance matrix */
    /* NULL and 0 with statistics made earlier: */
    int64_t tokens_text; /* tokens of the whole text */
    int64_t documents;
    const char *sample; /* "even", "random" */
    int64_t seed;
    bool plain_special;
    char ids_sha256[65]; /* of the windows' ids as little-endian uint32 */
    double ppl;          /* of the 16-bit model on the first windows; NaN if not measured */
    int64_t ppl_windows; /* how many */
} qc_calibration;

/* ---- artifacts and gates ---- */

/* One file of an artifact that is a folder. */
typedef struct qc_artifact_file {
    char name[256]; /* without its folder */
    uint64_t n_bytes;
    char sha256[65];
} qc_artifact_file;

/* Strings and arrays are borrowed. */
typedef struct qc_artifact {
    const char *format;            /* "qpk", ... */
    const char *path;              /* as it is called after the run (NAME.rejected included) */
    uint64_t n_bytes;              /* of the file, or of all files of a folder */
    char sha256[65];               /* of the file; "" for a folder, which has: */
    const qc_artifact_file *files; /* [n_files] by name in byte order */
    int n_files;
    bool rejected; /* a gate failed */
} qc_artifact;

/* One limit and what was measured. Plain data; the table of known names is src/report's. */
typedef struct qc_gate {
    const char *name; /* static storage: a key of the table */
    double limit;
    double value; /* NaN = not measured, which never passes */
    bool pass;
} qc_gate;

#endif
