/* Statistics files: no input may crash; what is accepted can be read to the end, or its damage is named. */
#include "fuzz.h"
#include "qc_math.h"
#include "stats_internal.h"

#include <string.h>
#include <zlib.h>

/* Sums of wider stages are not asked for: they are large, not interesting. */
enum { MOST_WIDTH = 256 };

static qc_backend *be;

static void check_failure(int rc, const qc_err *err)
{
    FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED || rc == QC_E_RESOURCE);
    FUZZ_CHECK(err->code == rc && err->msg[0] && !strchr(err->msg, '\n'));
}

static void read_input(const qc_stats_file *file, qc_stats_place place)
{
    static float sums[MOST_WIDTH], abs[MOST_WIDTH], max[MOST_WIDTH];
    int64_t tokens;
    qc_err err = {0};
    int rc = qc_stats_summary(file, be, place, sums, abs, max, &tokens, &err);
    if (rc < 0)
        check_failure(rc, &err);
    else
        FUZZ_CHECK(tokens >= 0);
}

static void parse(const uint8_t *data, size_t n_bytes)
{
    qc_stats_file *file = NULL;
    qc_err err = {0};
    int rc = qc_stats_open(fuzz_file(".qcs", data, n_bytes), &file, &err);
    if (rc < 0) {
        check_failure(rc, &err);
        return;
    }
    const qc_stats_info *info = qc_stats_of(file);
    for (int64_t k = 0; k < qc_stats_n_places(info); k++) {
        qc_stats_place place = qc_stats_place_at(info, k);
        if (info->widths[place.stage] <= MOST_WIDTH)
            read_input(file, place);
    }
    qc_stats_close(file);
}

static void put_crc(uint8_t *at, const uint8_t *data, uint64_t n_bytes)
{
    qc_put_le(at, crc32_z(0, data, n_bytes), 4);
}

/* All checksums put right, so that changes of what they cover come through. */
static void repair(uint8_t *data, size_t n_bytes)
{
    if (n_bytes < QC_STATS_HEAD)
        return;
    uint64_t n_json = qc_get_le(data + 16, 8), at = QC_STATS_HEAD + n_json;
    if (n_json <= n_bytes - QC_STATS_HEAD)
        put_crc(data + 24, data + QC_STATS_HEAD, n_json);
    put_crc(data + 28, data, 28);
    while (n_json < n_bytes && at <= n_bytes && n_bytes - at >= QC_STATS_RECORD_HEAD) {
        uint8_t *head = data + at;
        uint64_t n = qc_get_le(head + 16, 8), room = n_bytes - at - QC_STATS_RECORD_HEAD;
        put_crc(head + 24, head + QC_STATS_RECORD_HEAD, n < room ? n : room);
        put_crc(head + 28, head, 28);
        if (n > room)
            return;
        at += QC_STATS_RECORD_HEAD + n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    qc_err err;
    if (!be)
        FUZZ_CHECK(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, &err) == QC_OK);
    fuzz_repaired(data, n_bytes, parse, repair);
    return 0;
}
