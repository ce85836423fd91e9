/* A model ready to run: a source, its normalised config and the place of every tensor. The forward pass
 * streams: one decoder layer's weights are prepared at a time, the caller holds the residual stream. */
#ifndef QC_MODEL_H
#define QC_MODEL_H

#include "backend.h"
#include "config.h"
#include "qc_source.h"

/* Role of a tensor, for policy, reports and the account of tensors. */
typedef enum {
    QC_ROLE_EMBEDDING,
    QC_ROLE_HEAD,
    QC_ROLE_LINEAR, /* a matrix of a decoder layer that may be quantized */
    QC_ROLE_ROUTER, /* scores the experts of a layer; never quantized */
    QC_ROLE_NORM,
    QC_ROLE_BIAS,
    QC_ROLE_TIED,    /* redundant copy of the embedding table: not stored again */
    QC_ROLE_BUFFER,  /* computed buffer (rotary_emb.inv_freq, masked_bias ...): dropped by name */
    QC_ROLE_OUTSIDE, /* of another part than the text model (images ...): dropped */
    QC_ROLE_UNKNOWN
} qc_tensor_role;

typedef struct qc_tensor_place {
    qc_tensor_role role;
    int layer;  /* -1 outside the layers */
    int expert; /* of its layer, -1 if it is none's */
} qc_tensor_place;

/* What a tensor is for. The first three exist once, the others in every layer. */
typedef enum {
    QC_SLOT_EMBEDDING,
    QC_SLOT_FINAL_NORM,
    QC_SLOT_HEAD,
    QC_SLOT_ATTN_NORM,
    QC_SLOT_Q,
    QC_SLOT_K,
    QC_SLOT_V,
    QC_SLOT_O,
    QC_SLOT_Q_BIAS,
    QC_SLOT_K_BIAS,
    QC_SLOT_V_BIAS,
    QC_SLOT_O_BIAS,
    QC_SLOT_Q_NORM,
    QC_SLOT_K_NORM,
    QC_SLOT_MLP_NORM,
    QC_SLOT_GATE,
    QC_SLOT_UP,
    QC_SLOT_DOWN,
    QC_SLOT_GATE_BIAS,
    QC_SLOT_UP_BIAS,
    QC_SLOT_DOWN_BIAS,
    QC_SLOT_QKV,            /* in one matrix: the rows of q, then of k, then of v */
    QC_SLOT_GATE_UP,        /* in one matrix: the rows of gate, then of up */
    QC_SLOT_POST_ATTN_NORM, /* of what attention adds to the stream */
    QC_SLOT_POST_MLP_NORM,  /* of what the MLP adds */
    QC_SLOT_ROUTER,         /* in layers with experts, which have no gate, up and down of their own */
    QC_SLOT_EXPERT_GATE,    /* this and the following exist in every expert of the layer */
    QC_SLOT_EXPERT_UP,
    QC_SLOT_EXPERT_DOWN,
    QC_N_SLOTS
} qc_slot;
#define QC_SLOT_FIRST_IN_LAYER  QC_SLOT_ATTN_NORM
#define QC_SLOT_FIRST_IN_EXPERT QC_SLOT_EXPERT_GATE

typedef struct qc_model {
    const qc_source *src; /* borrowed */
    qc_model_config config;
    qc_tensor_place *places; /* [src->n_tensors], owned */
    int64_t *tensors;        /* tensor numbers by layer, slot and expert, see qc_model_tensor; owned */
} qc_model;

/* Read the config and account for every tensor of the source: each gets a place, shapes and element types are
 * checked. QC_E_INPUT: a tensor is missing, unknown or of another shape than the config says;
 * QC_E_UNSUPPORTED: as qc_model_config_load, and element types that are no floats. The source must outlive
 * the model. */
int qc_model_open(const qc_source *src, qc_model *ret, qc_err *err) QC_WARN_UNUSED;
void qc_model_close(qc_model *model);

/* Number of the tensor of a slot; layer is ignored for the slots outside the layers. -1 if the model has
 * none. The head of a tied model is the embedding table. Slots of experts: of expert 0. */
int64_t qc_model_tensor(const qc_model *model, int layer, qc_slot slot);

/* The same for one expert; other slots do not ask which. */
int64_t qc_model_expert_tensor(const qc_model *model, int layer, qc_slot slot, int64_t expert);

/* First element of a tensor that is a NaN or infinity; *ret_row = -1 if there is none. */
int qc_model_find_nonfinite(const qc_model *model, int64_t tensor, int64_t *ret_row, int64_t *ret_col,
                            qc_err *err) QC_WARN_UNUSED;

/* End of a message ("; tensor ...") about a value that is not finite behind a layer (its number: the final
 * norm and the head): names the weight that is to blame, or says that all are finite. Reads them. */
void qc_model_blame_nonfinite(const qc_model *model, int layer, char ret[QC_ERR_MSG_BYTES]);

/* Embeddings of ids into host memory dst[n_ids, hidden] (with the family's embedding scale). QC_E_INPUT: id
 * out of range. */
int qc_model_embed(const qc_model *model, const int32_t *ids, int64_t n_ids, float *dst,
                   qc_err *err) QC_WARN_UNUSED;

/* The weights of one decoder layer, prepared on a backend. */
typedef struct qc_layer qc_layer;
int qc_layer_load(const qc_model *model, qc_backend *be, int layer, qc_layer **ret,
                  qc_err *err) QC_WARN_UNUSED;
void qc_layer_free(qc_layer *layer);

/* Scratch of the forward pass for sequences of up to max_tokens, reused over layers and windows. */
typedef struct qc_workspace qc_workspace;
int qc_workspace_new(const qc_model *model, qc_backend *be, int64_t max_tokens, qc_workspace **ret,
                     qc_err *err) QC_WARN_UNUSED;
void qc_workspace_free(qc_workspace *ws);
/* Bytes that qc_workspace_new and one prepared layer take, for plans. */
uint64_t qc_workspace_bytes(const qc_model_config *config, int64_t max_tokens);
uint64_t qc_layer_bytes(const qc_model_config *config, qc_compute compute);
/* Scratch of the backend for a pass of n_tokens and for preparing the layer. */
uint64_t qc_forward_scratch_bytes(const qc_model_config *config, qc_compute compute, int n_threads,
                                  int64_t n_tokens);

/* x[n_tokens, hidden] (backend memory) through one layer, in place: one sequence from position 0. The same
 * bits as the two halves of qc_layer_stage_input and qc_layer_stage_output, and as the experts one after the
 * other. */
int qc_layer_forward(const qc_layer *layer, qc_workspace *ws, float *x, int64_t n_tokens,
                     qc_err *err) QC_WARN_UNUSED;

/* A part of a pack of tokens. Its tokens stand behind those of the part before it in the pack, but what it
 * continues is the text of `parent`, an earlier part of the pack (-1: nothing): the parts from the first
 * ancestor down to it are its path, positions count along the path, and attention sees nothing else. */
typedef struct qc_part {
    int64_t n_tokens; /* >= 1 */
    int64_t parent;
} qc_part;

/* qc_layer_forward of a pack: x[sum of n_tokens, hidden], as if the path of each part ran on its own, with
 * shared parts computed once. QC_E_UNSUPPORTED: paths on both sides of a length at which the model's rotary
 * embedding changes. */
int qc_layer_forward_parts(const qc_layer *layer, qc_workspace *ws, float *x, const qc_part *parts,
                           int64_t n_parts, qc_err *err) QC_WARN_UNUSED;

/* Matrices of a layer that share one input, in the order of the computation. A layer has either the third and
 * fourth or, if it has experts, the last two: these are stages of each expert, whose inputs are the rows of
 * the tokens that the router sends to it. */
typedef enum {
    QC_STAGE_QKV,
    QC_STAGE_O,
    QC_STAGE_GATE_UP,
    QC_STAGE_DOWN,
    QC_STAGE_EXPERT_GATE_UP,
    QC_STAGE_EXPERT_DOWN,
    QC_N_STAGES
} qc_stage;
#define QC_N_DENSE_STAGES 4 /* the first ones: what a layer without experts has */

/* Static name of a stage ("qkv", "o", "gate_up", "down", "expert_gate_up", "expert_down"), its matrices as
 * the family stores them (slots, ended by QC_N_SLOTS) and the width of its input. */
const char *qc_stage_name(qc_stage stage);
const qc_slot *qc_stage_slots(const qc_family *family, qc_stage stage);
int64_t qc_stage_width(const qc_model_config *config, qc_stage stage);
int64_t qc_stage_rows(const qc_model_config *config, qc_stage stage); /* of the largest of its matrices */

/* Has a layer the stage, or any of them, and how many times: once, or once per expert? */
bool qc_stage_present(const qc_model_config *config, int layer, qc_stage stage);
bool qc_stage_in_any_layer(const qc_model_config *config, qc_stage stage);
int64_t qc_stage_experts(const qc_model_config *config, qc_stage stage);

/* u[n_tokens, width] = input of a stage's matrices for one sequence whose residual is x[n_tokens, hidden],
 * computed with the layer's present weights (and, if set, with quantized activations, u itself included).
 * QC_STAGE_EXPERT_GATE_UP: of every token, whichever experts it goes to. Not for QC_STAGE_EXPERT_DOWN, see
 * qc_layer_expert_down_input. */
int qc_layer_stage_input(const qc_layer *layer, qc_workspace *ws, qc_stage stage, const float *x, float *u,
                         int64_t n_tokens, qc_err *err) QC_WARN_UNUSED;

/* x += the stage's matrix times u, for QC_STAGE_O and QC_STAGE_DOWN; the product first goes through the norm
 * behind it and the residual scale, where the model has them. */
int qc_layer_stage_output(const qc_layer *layer, qc_workspace *ws, qc_stage stage, const float *u, float *x,
                          int64_t n_tokens, qc_err *err) QC_WARN_UNUSED;

/* Is what QC_STAGE_O or QC_STAGE_DOWN adds to the stream residual_scale times its product with u? Not with a
 * norm behind it. */
bool qc_stage_adds_product(const qc_model_config *config, qc_stage stage);

/* Experts that each token of one sequence goes to, experts and weights [n_tokens, n_chosen] in host memory:
 * the most probable first, each with what its output is multiplied by. */
int qc_layer_route(const qc_layer *layer, qc_workspace *ws, const float *x, int64_t n_tokens,
                   int32_t *experts, float *weights, qc_err *err) QC_WARN_UNUSED;

/* Where the router of a layer sends tokens, by token and by expert. Host memory, owned. */
typedef struct qc_routing {
    int32_t *experts;     /* [n_tokens, n_chosen] as qc_layer_route gives them */
    float *weights;       /* the same */
    int64_t *first;       /* [n_experts + 1] expert e has entries first[e] .. first[e + 1] - 1 of: */
    int32_t *tokens;      /* [n_tokens * n_chosen] ascending within an expert */
    float *token_weights; /* the same */
} qc_routing;

/* Arrays for at most n_tokens tokens. QC_E_UNSUPPORTED: more than 2^31 - 1 of them. Clear also on failure. */
int qc_routing_new(const qc_model_config *config, int64_t n_tokens, qc_routing *ret,
                   qc_err *err) QC_WARN_UNUSED;
void qc_routing_clear(qc_routing *routing);
uint64_t qc_routing_bytes(const qc_model_config *config, int64_t n_tokens);

/* Fill the arrays by expert from those by token. */
void qc_routing_by_expert(const qc_model_config *config, qc_routing *routing, int64_t n_tokens);

/* One expert: h[n_rows, expert_ffn] = input of its down matrix for inputs u[n_rows, hidden] of its stage
 * QC_STAGE_EXPERT_GATE_UP; x[tokens[i], :] += weights[i] * (down h[i, :]). */
int qc_layer_expert_down_input(const qc_layer *layer, qc_workspace *ws, int64_t expert, const float *u,
                               float *h, int64_t n_rows, qc_err *err) QC_WARN_UNUSED;
int qc_layer_expert_output(const qc_layer *layer, qc_workspace *ws, int64_t expert, const float *h,
                           const int32_t *tokens, const float *weights, int64_t n_rows, float *x,
                           qc_err *err) QC_WARN_UNUSED;

/* x[n_tokens, hidden] += what all experts make of it: one sequence. */
int qc_layer_experts_forward(const qc_layer *layer, qc_workspace *ws, float *x, int64_t n_tokens,
                             qc_err *err) QC_WARN_UNUSED;

/* Replace a matrix as it is stored (values from rows of fetch, shape as before; of an expert, if it is a slot
 * of experts) or a vector (host memory) of a prepared layer. */
int qc_layer_set_matrix(qc_layer *layer, qc_slot slot, int64_t expert, qc_fetch_rows_fn fetch, void *ctx,
                        qc_err *err) QC_WARN_UNUSED;
int qc_layer_set_vector(qc_layer *layer, qc_slot slot, const float *values, qc_err *err) QC_WARN_UNUSED;

/* Inputs of a stage's matrices are quantized on the fly (backend's quantize_acts); bits 0 = off, group_elems
 * 0 = one scale per token. What qc_layer_load sets comes from the model's tensors (QC_E_UNSUPPORTED if those
 * of a stage differ). */
void qc_layer_set_acts(qc_layer *layer, qc_stage stage, int bits, int64_t group_elems);

/* y = final norm of x, both [n_tokens, hidden] in backend memory; y may be x. */
int qc_model_final_norm(const qc_model *model, qc_backend *be, float *y, const float *x, int64_t n_tokens,
                        qc_err *err) QC_WARN_UNUSED;

/* Rows row0 .. of the output head ([vocab, hidden], the embedding table when tied), times logit_scale,
 * prepared for `linear`: logits of a slice of the vocabulary before any softcap. Free with be->weight_free.
 */
int qc_model_head_slice(const qc_model *model, qc_backend *be, int64_t row0, int64_t n_rows, qc_weight **ret,
                        qc_err *err) QC_WARN_UNUSED;

#endif
