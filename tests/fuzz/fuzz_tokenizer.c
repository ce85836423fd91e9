/* tokenizer.json files: no input may crash; what is accepted must encode and decode with ids inside the
 * vocabulary. The input also serves as a text for the tokenizer that was accepted last. */
#include "fuzz.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "tokenizer.h"

#include <string.h>

static qc_tokenizer *last;

static void check_failure(int rc, const qc_err *err)
{
    FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED || rc == QC_E_RESOURCE);
    FUZZ_CHECK(err->code == rc && err->msg[0] && !strchr(err->msg, '\n'));
}

static void encode(const qc_tokenizer *tok, const char *text, size_t n_bytes, bool flag)
{
    qc_encode_options options = {.add_special = flag, .plain_special = !flag};
    int32_t *ids = NULL;
    int64_t n_ids = 0;
    char *back = NULL;
    size_t back_bytes = 0;
    qc_err err = {0};
    int rc = qc_tokenizer_encode(tok, text, n_bytes, &options, &ids, &n_ids, &err);
    if (rc != QC_OK) {
        check_failure(rc, &err);
        FUZZ_CHECK(!ids);
        return;
    }
    for (int64_t i = 0; i < n_ids; i++)
        FUZZ_CHECK(qc_tokenizer_piece(tok, ids[i]) != NULL);
    FUZZ_CHECK(qc_tokenizer_decode(tok, ids, n_ids, flag, &back, &back_bytes, &err) == QC_OK);
    FUZZ_CHECK(qc_utf8_valid(back, back_bytes, NULL));
    qc_free(back);
    qc_free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const char text[] =
        "  It's 12345 <s>\r\n\t x\xC2\x85\xE2\x80\x83 A\xCC\x81\xCC\xA7\xED\x95\x9C\xE4\xB8\xAD\xE6\x96\x87"
        "\xF0\x9F\x91\x8D\xE2\x96\x81\xE2\x96\x81"
        "ab abc <s></s>word \x01";
    qc_tokenizer *tok = NULL;
    qc_err err = {0};
    int rc = qc_tokenizer_new((const char *)data, n_bytes, "fuzz", &tok, &err);
    if (rc == QC_OK) {
        qc_tokenizer_free(last);
        last = tok;
        encode(tok, text, sizeof text, true);
        encode(tok, text, sizeof text - 1, false);
        FUZZ_CHECK(qc_tokenizer_bos(tok) < qc_tokenizer_vocab_size(tok));
    } else {
        check_failure(rc, &err);
        FUZZ_CHECK(!tok);
    }
    if (last)
        encode(last, (const char *)data, n_bytes, n_bytes % 2);
    if (last) {
        rc = qc_tokenizer_apply_config(last, (const char *)data, n_bytes, "fuzz", &err);
        FUZZ_CHECK(rc == QC_OK || rc == QC_E_INPUT);
    }
    return 0;
}
