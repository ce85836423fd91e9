/* config.json of a checkpoint, normalised: both the classic (rope_theta, rope_scaling, torch_dtype) and the
 * newer (rope_parameters, dtype) spelling, class defaults filled in, every field that changes the result
 * either understood or refused by name. */
#ifndef QC_MODEL_CONFIG_H
#define QC_MODEL_CONFIG_H

#include "backend.h"
#include "qc_err.h"
#include "qc_rope.h"
#include "qc_source.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct qc_family qc_family; /* family.h: a row of the family table */

typedef enum {
    QC_QK_NORM_NONE = 0,
    QC_QK_NORM_HEAD, /* RMSNorm of each query and key head before rope, one gain for all heads */
    QC_QK_NORM_WHOLE /* of all heads of a token together */
} qc_qk_norm;

/* What stands in the names of a checkpoint for the "model." of the family's names, and before that of the
 * head.
 */
typedef struct qc_name_form {
    const char *body, *head;
} qc_name_form;

typedef struct qc_model_config {
    const qc_family *family;
    bool wrapped;             /* the text model is a part: tensors of other parts may lie beside it */
    const qc_name_form *form; /* static */
    int64_t hidden;           /* width of the residual stream */
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
    qc_qk_norm qk_norm;
    float norm_offset;                      /* RMSNorm multiplies by gain + this: 1 for Gemma */
    bool tied;                              /* head = embedding table */
    int64_t n_experts;                      /* of a sparse layer; 0 = there are none */
    int64_t n_chosen;                       /* experts that a token goes to */
    int64_t expert_ffn;                     /* inner width of an expert */
    bool renormalise;                       /* the weights of the chosen experts add up to 1 */
    bool *layer_sparse;                     /* [n_layers] has experts instead of one MLP; owned */
    int64_t sliding_window;                 /* 0 = none */
    bool *layer_slides;                     /* [n_layers] whether the window applies; owned */
    bool *layer_rotates;                    /* [n_layers] whether queries and keys are rotated; owned */
    float attention_scale;                  /* usually head_dim^-1/2 */
    float embedding_scale;                  /* 1 for most */
    float residual_scale;                   /* of what attention and MLP add to the stream; 1 for most */
    float logit_scale;                      /* of the head's result; 1 for most */
    float attention_softcap, final_softcap; /* 0 = none */
    int64_t rotary_dim;                     /* first elements of a head that rotate; head_dim for most */
    qc_rope_config rope;
    bool has_local_rope;
    qc_rope_config local_rope; /* of the layers that slide, if they have their own */
    int32_t bos, eos[8];       /* -1 = not set */
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
