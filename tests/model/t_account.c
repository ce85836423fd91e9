/* The account of tensors (cases S-9, S-10, T-11, C-7) and clean failure of every allocation. */
#include "golden.h"
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_test.h"

static void expect_open(mem_source *m, int rc, const char *expected)
{
    qc_model model;
    qc_err err = {0};
    qc_log_set_level(QC_LOG_QUIET);
    int got = qc_model_open(&m->base, &model, &err);
    ck_assert_msg(got == rc, "code %d, expected %d: %s", got, rc, err.msg);
    const char *text = got < 0 ? err.msg : model.config.notes ? model.config.notes : "";
    ck_assert_msg(strstr(text, expected) != NULL, "\"%s\" lacks \"%s\"", text, expected);
    if (got == QC_OK)
        qc_model_close(&model);
    mem_close(m);
}

static qc_model open_model(const mem_source *m)
{
    qc_model model;
    qc_err err = {0};
    qc_log_set_level(QC_LOG_QUIET);
    ck_assert_msg(qc_model_open(&m->base, &model, &err) == QC_OK, "%s", err.msg);
    return model;
}

static void expect_place(const qc_model *model, const char *name, qc_tensor_role role, int layer)
{
    int64_t t = model->src->find(model->src, name);
    ck_assert_msg(t >= 0, "%s", name);
    ck_assert_msg(model->places[t].role == role && model->places[t].layer == layer, "%s: role %d, layer %d",
                  name, (int)model->places[t].role, model->places[t].layer);
}

START_TEST(places)
{
    mem_source *m = mem_tiny("llama");
    qc_model model = open_model(m);
    expect_place(&model, "model.embed_tokens.weight", QC_ROLE_EMBEDDING, -1);
    expect_place(&model, "lm_head.weight", QC_ROLE_HEAD, -1);
    expect_place(&model, "model.norm.weight", QC_ROLE_NORM, -1);
    expect_place(&model, "model.layers.1.self_attn.o_proj.weight", QC_ROLE_LINEAR, 1);
    expect_place(&model, "model.layers.0.mlp.down_proj.weight", QC_ROLE_LINEAR, 0);
    expect_place(&model, "model.layers.1.input_layernorm.weight", QC_ROLE_NORM, 1);
    expect_place(&model, "model.layers.1.self_attn.rotary_emb.inv_freq", QC_ROLE_BUFFER, -1);
    ck_assert_ptr_nonnull(
        strstr(model.config.notes,
               "2 computed buffer(s) dropped, \"model.layers.0.self_attn.rotary_emb.inv_freq\""));
    ck_assert_int_eq(qc_model_tensor(&model, 1, QC_SLOT_Q_BIAS), -1);
    ck_assert_int_eq(qc_model_tensor(&model, 1, QC_SLOT_UP),
                     m->base.find(&m->base, "model.layers.1.mlp.up_proj.weight"));
    qc_model_close(&model);
    mem_close(m);
    m = mem_tiny("llama-bias");
    model = open_model(m);
    expect_place(&model, "model.layers.2.self_attn.o_proj.bias", QC_ROLE_BIAS, 2);
    for (int64_t t = 0; t < m->base.n_tensors; t++)
        ck_assert_int_ne(model.places[t].role, QC_ROLE_UNKNOWN);
    qc_model_close(&model);
    mem_close(m);
}
END_TEST

START_TEST(missing_and_unknown)
{
    mem_source *m = mem_tiny("llama");
    mem_remove(m, "model.layers.1.mlp.up_proj.weight");
    expect_open(m, QC_E_INPUT, "tensor \"model.layers.1.mlp.up_proj.weight\" is missing");
    m = mem_tiny("llama");
    mem_remove_all(m, "o_proj.weight");
    expect_open(m, QC_E_INPUT,
                "tensor \"model.layers.0.self_attn.o_proj.weight\" and 1 more tensors are missing");
    m = mem_tiny("qwen2");
    mem_remove(m, "model.layers.2.self_attn.k_proj.bias");
    expect_open(m, QC_E_INPUT, "model.layers.2.self_attn.k_proj.bias");
    m = mem_tiny("llama");
    mem_remove(m, "model.embed_tokens.weight");
    expect_open(m, QC_E_INPUT, "model.embed_tokens.weight");
    m = mem_tiny("llama");
    mem_add(m, "foo.bar", 3, 4);
    expect_open(m, QC_E_INPUT, "tensor \"foo.bar\" is no part of a llama model");
    m = mem_tiny("llama"); /* a layer that the config does not have */
    mem_add(m, "model.layers.2.input_layernorm.weight", 0, 128);
    expect_open(m, QC_E_INPUT, "model.layers.2.input_layernorm.weight");
    m = mem_tiny("llama-bias"); /* a bias that the config denies */
    mem_patch(m, "{\"mlp_bias\": false}");
    expect_open(m, QC_E_INPUT, ".bias\" is no part");
    m = mem_tiny("llama");
    mem_patch(m, "{\"num_hidden_layers\": 9999}");
    expect_open(m, QC_E_INPUT, "num_hidden_layers is 9999");
    m = mem_tiny("llama");
    mem_add(m, "model.layers.0.attn.masked_bias", 0, 1);
    expect_open(m, QC_OK, "3 computed buffer(s) dropped");
}
END_TEST

START_TEST(shapes_and_types)
{
    mem_source *m = mem_tiny("llama");
    mem_patch(m, "{\"intermediate_size\": 255}");
    expect_open(m, QC_E_INPUT,
                "tensor \"model.layers.0.mlp.gate_proj.weight\" has shape [256, 128], expected [255, 128]");
    m = mem_tiny("llama");
    mem_patch(m, "{\"num_key_value_heads\": 4}");
    expect_open(m, QC_E_INPUT, "k_proj.weight\" has shape [64, 128], expected [128, 128]");
    m = mem_tiny("llama");
    mem_tensor_of(m, "model.norm.weight")->info.n_dims = 2;
    mem_tensor_of(m, "model.norm.weight")->info.shape[1] = 1;
    expect_open(m, QC_E_INPUT, "tensor \"model.norm.weight\" has shape [128, 1], expected [128]");
    m = mem_tiny("llama");
    mem_tensor_of(m, "model.layers.1.self_attn.q_proj.weight")->info.dtype = QC_DT_I8;
    expect_open(m, QC_E_UNSUPPORTED,
                "model.layers.1.self_attn.q_proj.weight\" holds I8, expected F32, F16, BF16 or F64");
    m = mem_tiny("llama");
    mem_tensor_of(m, "model.norm.weight")->info.dtype = QC_DT_GRID;
    expect_open(m, QC_E_INPUT, "model.norm.weight\" is on a grid");
}
END_TEST

START_TEST(s10_tied_head)
{
    mem_source *m = mem_tiny("qwen3"); /* has an equal lm_head */
    qc_model model = open_model(m);
    ck_assert(model.config.tied);
    expect_place(&model, "lm_head.weight", QC_ROLE_TIED, -1);
    ck_assert_int_eq(qc_model_tensor(&model, 0, QC_SLOT_HEAD), qc_model_tensor(&model, 0, QC_SLOT_EMBEDDING));
    qc_model_close(&model);

    mem_tensor *head = mem_tensor_of(m, "lm_head.weight"); /* the last value differs */
    head->values[qc_tensor_n_elems(&head->info) - 1] += 1;
    model = open_model(m);
    ck_assert(!model.config.tied);
    expect_place(&model, "lm_head.weight", QC_ROLE_HEAD, -1);
    ck_assert_int_ne(qc_model_tensor(&model, 0, QC_SLOT_HEAD), qc_model_tensor(&model, 0, QC_SLOT_EMBEDDING));
    ck_assert_ptr_nonnull(strstr(model.config.notes, "treated as not tied"));
    qc_model_close(&model);
    mem_close(m);

    m = mem_tiny("qwen3"); /* the head alone stands for both */
    mem_remove(m, "model.embed_tokens.weight");
    model = open_model(m);
    expect_place(&model, "lm_head.weight", QC_ROLE_EMBEDDING, -1);
    ck_assert_int_ge(qc_model_tensor(&model, 0, QC_SLOT_EMBEDDING), 0);
    qc_model_close(&model);
    mem_close(m);

    m = mem_tiny("qwen3");
    mem_remove(m, "lm_head.weight");
    expect_open(m, QC_OK, "");
    m = mem_tiny("qwen3-untied"); /* false: the head is demanded */
    mem_remove(m, "lm_head.weight");
    expect_open(m, QC_E_INPUT, "tensor \"lm_head.weight\" is missing although the head is not tied");
    m = mem_tiny("qwen3"); /* absent: the class default, printed */
    mem_patch(m, "{\"tie_word_embeddings\": \"ABSENT\"}");
    expect_open(m, QC_OK, "tie_word_embeddings is absent, class default false");
    m = mem_tiny("llama3-rope");
    mem_patch(m, "{\"tie_word_embeddings\": \"ABSENT\"}");
    expect_open(m, QC_E_INPUT, "tensor \"lm_head.weight\" is missing");
    m = mem_tiny("qwen3"); /* a tied head of another shape */
    mem_remove(m, "lm_head.weight");
    mem_add(m, "lm_head.weight", 511, 128);
    expect_open(m, QC_E_INPUT, "tensor \"lm_head.weight\" has shape [511, 128], expected [512, 128]");
}
END_TEST

/* T-11: more rows than tokens; none is cut, whatever vocab_size says. */
START_TEST(t11_padding_rows)
{
    mem_source *m = mem_tiny("llama");
    mem_patch(m, "{\"vocab_size\": 500}");
    qc_model model = open_model(m);
    float row[128];
    int32_t id = 511;
    ck_assert_int_eq(model.config.vocab, 512);
    ck_assert_int_eq(qc_model_embed(&model, &id, 1, row, NULL), QC_OK);
    ck_assert_mem_eq(row, mem_tensor_of(m, "model.embed_tokens.weight")->values + 511 * 128, sizeof row);
    qc_model_close(&model);
    mem_close(m);
}
END_TEST

static int open_and_run(const mem_source *m, qc_backend *be, qc_err *err)
{
    qc_model model;
    qc_layer *layer = NULL;
    qc_workspace *ws = NULL;
    qc_weight *head = NULL;
    float *x = NULL, host[2 * 128] = {0};
    QC_TRY(qc_model_open(&m->base, &model, err));
    int rc = qc_layer_load(&model, be, 0, &layer, err);
    if (rc == QC_OK)
        rc = qc_workspace_new(&model, be, 2, &ws, err);
    if (rc == QC_OK)
        rc = (x = be->alloc(be, 2 * model.config.hidden, err)) ? QC_OK : QC_E_RESOURCE;
    if (rc == QC_OK)
        rc = be->upload(be, x, host, 2 * model.config.hidden, err);
    if (rc == QC_OK)
        rc = qc_layer_forward(layer, ws, x, 2, err);
    if (rc == QC_OK)
        rc = qc_model_final_norm(&model, be, x, x, 2, err);
    if (rc == QC_OK)
        rc = qc_model_head_slice(&model, be, 0, 7, &head, err);
    be->weight_free(be, head);
    if (x)
        be->free(be, x);
    qc_workspace_free(ws);
    qc_layer_free(layer);
    qc_model_close(&model);
    return rc;
}

/* Leaks show under the address sanitizer. */
START_TEST(every_allocation_may_fail)
{
    static const char *const names[] = {"llama-bias", "qwen3", "gemma3_text", "phi3"};
    qc_log_set_level(QC_LOG_QUIET);
    for (int i = 0; i < 4; i++) {
        mem_source *m = mem_tiny(names[i]);
        qc_backend *be = NULL;
        qc_err err = {0};
        mem_set_file(m, "generation_config.json", "{\"eos_token_id\": [7, 9]}");
        mem_patch(m, "{\"vocab_size\": \"ABSENT\"}");
        ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, &err), QC_OK);
        ck_assert_msg(open_and_run(m, be, &err) == QC_OK, "%s", err.msg); /* the backend keeps its scratch */
        qc_alloc_fail_at(0);
        ck_assert_msg(open_and_run(m, be, &err) == QC_OK, "%s", err.msg);
        long n = qc_alloc_fail_at(0);
        ck_assert_int_gt(n, 20);
        for (long k = 1; k <= n; k++) {
            qc_err failed = {0};
            qc_alloc_fail_at(k);
            int rc = open_and_run(m, be, &failed);
            qc_alloc_fail_at(0);
            ck_assert_msg(rc == QC_E_RESOURCE && failed.msg[0], "%s: allocation %ld of %ld: code %d: %s",
                          names[i], k, n, rc, failed.msg);
        }
        qc_backend_close(be);
        mem_close(m);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"places", places},
        {"missing_and_unknown", missing_and_unknown},
        {"shapes_and_types", shapes_and_types},
        {"s10_tied_head", s10_tied_head},
        {"t11_padding_rows", t11_padding_rows},
        {"allocation_failures", every_allocation_may_fail},
        {NULL, NULL},
    };
    return run_tests("account", cases);
}
