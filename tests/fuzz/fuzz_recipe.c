/* Recipes: no input may crash; what is refused gets one line with a place, what is accepted can be printed.
 */
#include "fuzz.h"
#include "recipe.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    qc_recipe recipe = {0};
    qc_err err = {0};
    int rc = qc_recipe_parse((const char *)data, n_bytes, "fuzz", "folder", NULL, &recipe, &err);
    if (rc == QC_OK) {
        cJSON *doc = qc_recipe_to_json(&recipe);
        FUZZ_CHECK(doc);
        cJSON_Delete(doc);
        for (int i = 0; i < recipe.n_emit; i++)
            FUZZ_CHECK(recipe.emit[i].path && qc_recipe_format(&recipe.emit[i]) != NULL);
        FUZZ_CHECK(recipe.quantize.weights.bits >= 2 && recipe.quantize.weights.bits <= 8);
        qc_recipe_clear(&recipe);
        return 0;
    }
    FUZZ_CHECK(err.code == rc && !strchr(err.msg, '\n'));
    if (rc == QC_E_INPUT)
        FUZZ_CHECK(strncmp(err.msg, "fuzz:", 5) == 0);
    else /* a format by its extension, or a value whose feature is not built yet */
        FUZZ_CHECK(rc == QC_E_USAGE || rc == QC_E_UNSUPPORTED);
    FUZZ_CHECK(!recipe.model && !recipe.emit);
    return 0;
}
