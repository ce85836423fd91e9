/* config.json of a checkpoint, normalised: both the classic (rope_theta, rope_scaling, torch_dtype) and the
 * newer (rope_parameters, dtype) spelling, class defaults filled in, every field that changes the result
 * either understood or refused by name. */
#ifndef QC_MODEL_CONFIG_H
#define QC_MODEL_CONFIG_H

#include "backend.h"
#include "qc_err.h"
#include "qc_source.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct qc_family qc_family; /* family.h: a row of the family table */

typedef enum {
    QC_ROPE_DEFAULT = 0,
    QC_ROPE_LINEAR,
    QC_ROPE_DYNAMIC,
    QC_ROPE_YARN,
    QC_ROPE_LLAMA3,
    QC_ROPE_LONGROPE
} qc_rope_kind;

typedef struct qc_rope_config {
    qc_rope_kind kind;
    double theta;
    double partial_rotary_factor; /* 1 = the whole head rotates */
    double factor;                /* of the scaling kinds */
    int64_t original_max_positions;
    double low_freq_factor, high_freq_factor;      /* llama3 */
    double beta_fast, beta_slow, attention_factor; /* yarn; attention_factor multiplies cos and sin */
    bool truncate;                                 /* yarn: round the correction range to whole dimensions */
} qc_rope_config;

typedef struct qc_model_config {
    const qc_family *family;
    int64_t hidden; /* width of the residual stream */
    int64_t n_layers;
    int64_t n_heads; /* query heads */
    int64_t n_kv_heads;
    int64_t head_dim; /* explicit, not always hidden / n_heads */
    int64_t ffn;      /* inner width of the MLP */
    int64_t vocab;    /* rows of the embedding table */
    int64_t max_positions;
    float rms_eps;
    qc_activation act;
    bool qkv_bias, o_bias, mlp_bias;
    bool qk_norm;                           /* RMSNorm of each q and k head before rope */
    bool tied;                              /* head = embedding table */
    int64_t sliding_window;                 /* 0 = none */
    bool *layer_slides;                     /* [n_layers] whether the window applies; owned */
    float attention_scale;                  /* usually head_dim^-1/2 */
    float embedding_scale;                  /* 1 for most */
    float attention_softcap, final_softcap; /* 0 = none */
    qc_rope_config rope;
    int32_t bos, eos[8]; /* -1 = not set */
    int n_eos;
    char *notes; /* newline-separated remarks (defaults applied, disagreements), already logged; owned, may be
                    NULL */
} qc_model_config;

/* Parse the config.json of a source; generation_config.json and tokenizer_config.json give further end ids,
 * the rows of the embedding table the vocabulary. Strict: QC_E_UNSUPPORTED for an unknown family or a field
 * that matters and is not understood, QC_E_INPUT for contradictions; messages name file, key, value and what
 * was expected. Remarks are logged as they arise and kept in notes. `tied` is what the config says;
 * qc_model_open compares it with the tensors. */
int qc_model_config_load(const qc_source *src, qc_model_config *ret, qc_err *err) QC_WARN_UNUSED;
void qc_model_config_clear(qc_model_config *config);

#endif
