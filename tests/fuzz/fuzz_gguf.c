/* GGUF files: no input may crash; what is accepted lies inside the file, and side files made from it are
 * JSON. */
#include "fuzz.h"
#include "gguf_internal.h"
#include "qc_alloc.h"
#include "qc_json.h"

#include <string.h>

static void check_error(int rc, const qc_err *err)
{
    FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED);
    FUZZ_CHECK(err->code == rc && strncmp(err->msg, "fuzz: ", 6) == 0 && !strchr(err->msg, '\n'));
}

static void check_text(int rc, char *text, const qc_err *err)
{
    cJSON *doc = NULL;
    if (rc < 0)
        check_error(rc, err);
    else if (text)
        FUZZ_CHECK(qc_json_parse(text, strlen(text), "made", false, &doc, NULL) == QC_OK);
    cJSON_Delete(doc);
    qc_free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    qc_gguf_file file = {0};
    qc_gguf_shape shape;
    qc_err err = {0};
    int rc = qc_gguf_parse(data, n_bytes, "fuzz", &file, &err);
    if (rc < 0) {
        check_error(rc, &err);
        return 0;
    }
    for (int64_t i = 0; i < file.n_tensors; i++) {
        const qc_gguf_tensor *t = &file.tensors[i];
        float first[QC_BLOCK_MAX_ELEMS];
        FUZZ_CHECK(t->n_bytes == 0 || (t->offset <= n_bytes && t->n_bytes <= n_bytes - t->offset));
        if (t->n_bytes > 0 && t->type->dtype == QC_DT_GRID)
            qc_block_decode(t->type, data + t->offset, 1, first);
    }
    char *text = NULL;
    rc = qc_gguf_read_shape(&file, &shape, &err);
    if (rc == QC_OK)
        rc = qc_gguf_make_config(&file, &shape, &text, &err);
    check_text(rc, text, &err);
    static int (*const make[])(const qc_gguf_file *, char **, qc_err *) = {
        qc_gguf_make_generation_config, qc_gguf_make_tokenizer_config, qc_gguf_make_tokenizer};
    for (size_t i = 0; i < sizeof make / sizeof make[0]; i++) {
        text = NULL;
        rc = make[i](&file, &text, &err);
        check_text(rc, text, &err);
    }
    qc_gguf_clear(&file);
    return 0;
}
