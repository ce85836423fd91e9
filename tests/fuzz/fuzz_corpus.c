/* Calibration corpora: token files (.npy) and texts (.jsonl, .txt). No input may crash; windows of what is
 * accepted hold ids of the vocabulary. */
#include "corpus.h"
#include "fuzz.h"
#include "open.h"
#include "qc_alloc.h"

#include <string.h>

enum { VOCAB = 512, POSITIONS = 256 };

static qc_source *model, src;

/* A model without weights: the tokenizer of a tiny one, and a chat template. */
static int side_file(const qc_source *s, const char *name, char **ret, size_t *ret_bytes, qc_err *err)
{
    static const char chatml[] =
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + "
        "message.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt "
        "%}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
    (void)s;
    if (strcmp(name, "chat_template.jinja") != 0)
        return model->side_file(model, name, ret, ret_bytes, err);
    *ret = qc_strdup(chatml);
    *ret_bytes = strlen(chatml);
    return *ret ? QC_OK : QC_E_RESOURCE;
}

static void open_model(void)
{
    qc_err err = {0};
    FUZZ_CHECK(qc_source_open(fuzz_tiny_model("llama"), &model, &err) == QC_OK);
    src = *model;
    src.side_file = side_file;
}

static void load(const char *ending, const uint8_t *data, size_t n_bytes, const qc_corpus_options *options)
{
    qc_corpus corpus = {0};
    qc_event_list events = {0};
    qc_err err = {0};
    int rc = qc_corpus_load(&src, fuzz_file(ending, data, n_bytes), options, VOCAB, &events, &corpus, &err);
    if (rc == QC_OK) {
        FUZZ_CHECK(corpus.n_windows >= 1 && corpus.length >= 1 && corpus.length <= POSITIONS);
        FUZZ_CHECK(corpus.n_windows <= options->windows);
        for (int64_t i = 0; i < corpus.n_windows * corpus.length; i++)
            FUZZ_CHECK(corpus.ids[i] >= 0 && corpus.ids[i] < VOCAB);
        qc_corpus_clear(&corpus);
    } else {
        FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED || rc == QC_E_USAGE || rc == QC_E_RESOURCE);
        FUZZ_CHECK(err.code == rc && err.msg[0] && !strchr(err.msg, '\n') && !corpus.ids);
    }
    qc_event_list_clear(&events);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    qc_corpus_options options = {.windows = 4, .length = 3, .max_positions = POSITIONS};
    if (!model)
        open_model();
    if (n_bytes > 1 && memcmp(data, "\x93N", 2) == 0) {
        load(".npy", data, n_bytes, &options);
        options.length = 0;
        load(".npy", data, n_bytes, &options);
        return 0;
    }
    load(".jsonl", data, n_bytes, &options);
    options.documents = QC_DOCUMENTS_BLANK_LINE;
    load(".txt", data, n_bytes, &options);
    return 0;
}
