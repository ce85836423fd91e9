/* Models of several parts (case C-8): the text part of each kind of wrapper computes what it does alone, the
 * rest is dropped and said to be; what can not be told apart is refused. That the text part of these classes
 * is the plain model is checked against transformers by scripts/make_family_vectors.py. */
#include "golden.h"
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_test.h"

typedef struct wrapping {
    const char *tiny;        /* text model */
    const char *body, *head; /* of the names, see qc_name_form */
    const char *outer;       /* members of the outer object */
    const char *others[2];   /* tensors of other parts */
} wrapping;

static const wrapping wrappings[] = {
    {"gemma3_text",
     "language_model.model.",
     "language_model.",
     "\"model_type\": \"gemma3\", \"architectures\": [\"Gemma3ForConditionalGeneration\"], "
     "\"mm_tokens_per_image\": 256",
     {"vision_tower.embeddings.weight", "multi_modal_projector.norm.weight"}},
    {"gemma3_text",
     "model.language_model.",
     "",
     "\"model_type\": \"gemma3\", \"architectures\": [\"Gemma3ForConditionalGeneration\"], "
     "\"boi_token_index\": 3",
     {"model.vision_tower.embeddings.weight", "model.multi_modal_projector.norm.weight"}},
    {"llama",
     "language_model.model.",
     "language_model.",
     "\"model_type\": \"llava\", \"architectures\": [\"LlavaForConditionalGeneration\"], "
     "\"vision_feature_layer\": -2",
     {"vision_tower.embeddings.weight", "multi_modal_projector.linear_1.weight"}},
    {"mistral",
     "language_model.model.",
     "language_model.",
     "\"model_type\": \"llava_next\", \"architectures\": [\"LlavaNextForConditionalGeneration\"]",
     {"vision_tower.embeddings.weight", "image_newline"}},
    {"mistral",
     "language_model.model.",
     "language_model.",
     "\"model_type\": \"mistral3\", \"architectures\": [\"Mistral3ForConditionalGeneration\"]",
     {"vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"}},
    {"llama",
     "model.text_model.",
     "",
     "\"model_type\": \"idefics3\", \"architectures\": [\"Idefics3ForConditionalGeneration\"], "
     "\"scale_factor\": 4",
     {"model.vision_model.embeddings.weight", "model.connector.proj.weight"}},
    {"llama",
     "model.text_model.",
     "",
     "\"model_type\": \"smolvlm\", \"architectures\": [\"SmolVLMForConditionalGeneration\"], "
     "\"image_token_id\": 3",
     {"model.vision_model.embeddings.weight", "model.connector.proj.weight"}},
    {"qwen2",
     "language_model.model.",
     "language_model.",
     "\"model_type\": \"internvl\", \"architectures\": [\"InternVLForConditionalGeneration\"], "
     "\"downsample_ratio\": 0.5",
     {"vision_tower.embeddings.weight", "multi_modal_projector.linear_1.weight"}},
};

enum { N_WRAPPINGS = sizeof wrappings / sizeof wrappings[0] };

static void rename_all(mem_source *m, const wrapping *w)
{
    for (int64_t i = 0; i < m->base.n_tensors; i++) {
        const char *old = m->tensors[i].info.name;
        bool body = strncmp(old, "model.", 6) == 0;
        m->tensors[i].info.name = qc_asprintf("%s%s", body ? w->body : w->head, old + (body ? 6 : 0));
        qc_free((char *)(uintptr_t)old);
    }
}

/* The text model in its wrapper; `extra`: more members of the outer object. */
static mem_source *wrap(const wrapping *w, const char *extra)
{
    mem_source *m = mem_tiny(w->tiny);
    char *inner = NULL;
    size_t n_bytes = 0;
    rename_all(m, w);
    for (int i = 0; i < 2; i++)
        mem_add(m, w->others[i], 3, 5);
    ck_assert_int_eq(m->base.side_file(&m->base, "config.json", &inner, &n_bytes, NULL), QC_OK);
    char *text = qc_asprintf("{%s, \"vision_config\": {\"hidden_size\": 9}%s, \"text_config\": %s}", w->outer,
                             extra, inner);
    mem_set_file(m, "config.json", text);
    qc_free(text);
    qc_free(inner);
    return m;
}

static run_result run_source(const mem_source *m, const int32_t *ids, int64_t n)
{
    qc_backend *be = NULL;
    qc_model model;
    qc_err err = {0};
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, NULL), QC_OK);
    ck_assert_msg(qc_model_open(&m->base, &model, &err) == QC_OK, "%s", err.msg);
    run_result r = run_model(&model, be, ids, 1, n, 512);
    qc_model_close(&model);
    qc_backend_close(be);
    return r;
}

static void expect_open(mem_source *m, int rc, const char *expected)
{
    qc_model model;
    qc_err err = {0};
    int got = qc_model_open(&m->base, &model, &err);
    ck_assert_msg(got == rc, "code %d, expected %d: %s", got, rc, err.msg);
    const char *text = got < 0 ? err.msg : model.config.notes ? model.config.notes : "";
    ck_assert_msg(strstr(text, expected) != NULL, "\"%s\" lacks \"%s\"", text, expected);
    if (got == QC_OK)
        qc_model_close(&model);
    mem_close(m);
}

START_TEST(text_part_alone)
{
    static const int32_t ids[] = {7, 100, 3, 250, 61, 8, 8, 19, 44, 200, 31, 77};
    enum { N = sizeof ids / sizeof ids[0] };
    for (int i = 0; i < N_WRAPPINGS; i++) {
        const wrapping *w = &wrappings[i];
        mem_source *plain = mem_tiny(w->tiny), *wrapped = wrap(w, "");
        run_result a = run_source(plain, ids, N), b = run_source(wrapped, ids, N);
        ck_assert_msg(memcmp(a.logits, b.logits, (size_t)(N * a.vocab) * sizeof(float)) == 0, "%s", w->outer);
        run_free(&a);
        run_free(&b);
        mem_close(plain);
        mem_close(wrapped);
    }
}
END_TEST

START_TEST(the_rest_is_dropped)
{
    for (int i = 0; i < N_WRAPPINGS; i++) {
        const wrapping *w = &wrappings[i];
        mem_source *m = wrap(w, "");
        qc_model model;
        ck_assert_int_eq(qc_model_open(&m->base, &model, NULL), QC_OK);
        for (int64_t t = 0; t < m->base.n_tensors; t++) {
            const char *name = m->tensors[t].info.name;
            bool other = strcmp(name, w->others[0]) == 0 || strcmp(name, w->others[1]) == 0;
            ck_assert_msg((model.places[t].role == QC_ROLE_OUTSIDE) == other, "%s", name);
            ck_assert_int_ne(model.places[t].role, QC_ROLE_UNKNOWN);
        }
        ck_assert_ptr_nonnull(
            strstr(model.config.notes, "2 tensor(s) of other parts than the text model dropped"));
        qc_model_close(&model);
        mem_close(m);
    }
}
END_TEST

START_TEST(heads)
{
    const wrapping *llava = &wrappings[2], *gemma = &wrappings[0];
    expect_open(wrap(llava, ", \"tie_word_embeddings\": true"), QC_OK, "the checkpoint has a head");
    mem_source *m = wrap(llava, ", \"tie_word_embeddings\": true");
    mem_remove(m, "language_model.lm_head.weight");
    expect_open(m, QC_OK, "the checkpoint has no head");
    m = wrap(llava, ", \"tie_word_embeddings\": false");
    mem_remove(m, "language_model.lm_head.weight");
    expect_open(m, QC_E_INPUT, "\"language_model.lm_head.weight\" is missing although the head is not tied");
    m = wrap(gemma, "");
    mem_remove(m, "language_model.model.embed_tokens.weight");
    expect_open(m, QC_E_INPUT, "\"model.embed_tokens.weight\" is missing");
}
END_TEST

START_TEST(refusals)
{
    const wrapping *gemma = &wrappings[0];
    mem_source *m = mem_tiny("llama"); /* a vision tower in a model that says nothing of one */
    mem_add(m, "vision_tower.embeddings.weight", 3, 5);
    expect_open(m, QC_E_INPUT, "\"vision_tower.embeddings.weight\" is no part of a llama model");
    m = mem_tiny("gemma3_text");
    mem_patch(m, "{\"model_type\": \"gemma3\"}");
    expect_open(m, QC_E_INPUT, "model_type gemma3 without \"text_config\"");
    m = mem_tiny("gemma3_text");
    mem_patch(m, "{\"vision_config\": {\"hidden_size\": 8}}");
    expect_open(m, QC_E_UNSUPPORTED, "vision_config");
    m = wrap(gemma, "");
    mem_add(m, "language_model.model.layers.0.self_attn.extra.weight", 3, 5);
    expect_open(m, QC_E_INPUT, "self_attn.extra.weight\" is no part");
    expect_open(wrap(gemma, ", \"quantization_config\": {\"quant_method\": \"awq\"}"), QC_E_UNSUPPORTED,
                "quantization_config");
    expect_open(wrap(gemma, ", \"is_encoder_decoder\": true"), QC_E_UNSUPPORTED, "is_encoder_decoder");
    m = wrap(gemma, "");
    mem_patch(m, "{\"model_type\": \"paligemma\"}");
    expect_open(m, QC_E_UNSUPPORTED, "\"paligemma\" is not supported");
    m = wrap(gemma, "");
    mem_patch(m, "{\"architectures\": [\"Gemma3ForSequenceClassification\"]}");
    expect_open(m, QC_E_UNSUPPORTED, "Gemma3ForSequenceClassification");
    m = wrap(gemma, "");
    mem_patch(m, "{\"text_config\": {\"hidden_size\": 64}}");
    expect_open(m, QC_E_INPUT, "\"model_type\" is missing in \"text_config\"");
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"text_part_alone", text_part_alone},
                               {"the_rest_is_dropped", the_rest_is_dropped},
                               {"heads", heads},
                               {"refusals", refusals},
                               {NULL, NULL}};
    qc_log_set_level(QC_LOG_QUIET);
    return run_tests("wrappers", cases);
}
