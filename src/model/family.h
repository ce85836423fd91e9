/* The family table: what makes one decoder family differ from another, as a row of flags, class defaults and
 * a map of tensor names. There is no source file per family: config.c reads a config by its row, model.c
 * finds the tensors by its map, forward.c follows the flags of the normalised config. */
#ifndef QC_MODEL_FAMILY_H
#define QC_MODEL_FAMILY_H

#include "model.h"

/* Which bias vectors exist. */
typedef enum {
    QC_BIAS_NEVER = 0,
    QC_BIAS_ALWAYS,
    QC_BIAS_BY_KEY /* attention_bias or mlp_bias of the config, false when absent */
} qc_bias_rule;

/* Which layers attend through the sliding window. */
typedef enum {
    QC_WINDOW_NEVER = 0,
    QC_WINDOW_EVERY_LAYER, /* sliding_window set: all of them */
    QC_WINDOW_UPPER_LAYERS /* use_sliding_window: layers from max_window_layers on, or as layer_types says */
} qc_window_rule;

/* What an absent key of config.json means; a config file may be a mere difference from these. */
typedef struct qc_class_defaults {
    int64_t vocab, hidden, n_layers, n_heads, ffn, max_positions;
    int64_t n_kv_heads;     /* 0 = as many as query heads */
    int64_t head_dim;       /* 0 = hidden / n_heads */
    int64_t sliding_window; /* 0 = none */
    int64_t max_window_layers;
    double rope_theta, rms_eps;
    bool tied;
} qc_class_defaults;

struct qc_family {
    const char *model_type; /* "model_type" of config.json */
    const char *class_name; /* "architectures" of config.json */
    qc_class_defaults defaults;
    qc_bias_rule qkv_bias, o_bias, mlp_bias;
    bool qk_norm;
    qc_window_rule window;
    const char *layer_prefix; /* a layer's tensor is called PREFIX LAYER "." NAME */
    const char *const *names; /* [QC_N_SLOTS]; NULL = the family has no such tensor */
};

/* Row of a model_type, NULL if there is none. */
const qc_family *qc_family_find(const char *model_type);

/* Row number i, NULL past the end. */
const qc_family *qc_family_at(int i);

/* Length that a dimension of a tensor must have. */
typedef enum {
    QC_DIM_NONE = 0,
    QC_DIM_VOCAB,
    QC_DIM_HIDDEN,
    QC_DIM_Q,
    QC_DIM_KV,
    QC_DIM_HEAD,
    QC_DIM_FFN
} qc_dim;

typedef struct qc_slot_info {
    qc_tensor_role role;
    qc_dim rows; /* QC_DIM_NONE: a vector of cols elements */
    qc_dim cols;
} qc_slot_info;

/* Role and shape of a slot. */
const qc_slot_info *qc_slot_of(qc_slot slot);

/* Does a model of this config have the tensor (in its layer)? A tied model has no head of its own. */
bool qc_slot_present(const qc_model_config *config, qc_slot slot);

/* Elements along a dimension; 0 for QC_DIM_NONE. */
int64_t qc_dim_elems(const qc_model_config *config, qc_dim dim);

#endif
