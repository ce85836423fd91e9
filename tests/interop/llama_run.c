/* A model in llama.cpp, for scripts/interop: usage llama_run MODEL TEXT WINDOWS LENGTH GREEDY. Prints one
 * JSON object: tokens of the text, mean NLL over windows of LENGTH tokens from the beginning (all targets but
 * the first of each), the first 16 tokens of the text with GREEDY tokens of greedy text behind them and the
 * mean NLL of both. Keys and values are float32 and attention is not fused, so that only products of
 * quantized matrices differ from float32. */
#include <llama.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 16, MAX_GREEDY = 64 };

static void only_errors(enum ggml_log_level level, const char *text, void *ctx)
{
    (void)ctx;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

static char *slurp(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0)
        return NULL;
    long size = ftell(f);
    char *text = malloc((size_t)size + 1);
    rewind(f);
    *n = text ? fread(text, 1, (size_t)size, f) : 0;
    fclose(f);
    return text;
}

static llama_token *tokenize(const struct llama_vocab *vocab, const char *text, size_t n, int *ret_n)
{
    llama_token *ids = malloc((n + 8) * sizeof *ids);
    *ret_n = ids ? llama_tokenize(vocab, text, (int)n, ids, (int)n + 8, false, true) : -1;
    return ids;
}

static double nll_of(const float *logits, int n_vocab, llama_token target)
{
    double most = (double)logits[0], sum = 0;
    for (int i = 1; i < n_vocab; i++)
        most = (double)logits[i] > most ? (double)logits[i] : most;
    for (int i = 0; i < n_vocab; i++)
        sum += exp((double)logits[i] - most);
    return log(sum) + most - (double)logits[target];
}

/* Sum of NLL of a window. */
static int score(struct llama_context *ctx, int n_vocab, llama_token *ids, int length, double *sum)
{
    struct llama_batch batch = llama_batch_init(length, 0, 1);
    batch.n_tokens = length;
    for (int i = 0; i < length; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    llama_memory_clear(llama_get_memory(ctx), true);
    int rc = llama_decode(ctx, batch);
    for (int i = 0; i + 1 < length && rc == 0; i++)
        *sum += nll_of(llama_get_logits_ith(ctx, i), n_vocab, ids[i + 1]);
    llama_batch_free(batch);
    return rc;
}

/* Append n greedy tokens to the N_PROMPT of text. */
static int greedy(struct llama_context *ctx, int n_vocab, llama_token *text, int n)
{
    struct llama_batch batch = llama_batch_get_one(text, N_PROMPT);
    llama_memory_clear(llama_get_memory(ctx), true);
    for (llama_token *next = text + N_PROMPT; next < text + N_PROMPT + n; next++) {
        if (llama_decode(ctx, batch) != 0)
            return -1;
        const float *logits = llama_get_logits_ith(ctx, -1);
        *next = 0;
        for (int k = 1; k < n_vocab; k++)
            if (logits[k] > logits[*next])
                *next = k;
        batch = llama_batch_get_one(next, 1);
    }
    return 0;
}

static void print_result(int n_ids, double nll, double greedy_nll, const llama_token *text, int n)
{
    printf("{\"tokens\": %d, \"nll\": %.9g, \"greedy_nll\": %.9g, \"kernel\": \"CPU\", \"greedy\": [", n_ids,
           nll, greedy_nll);
    for (int i = 0; i < n; i++)
        printf("%s%d", i ? ", " : "", text[i]);
    printf("]}\n");
}

int main(int argc, char **argv)
{
    if (argc != 6)
        return 2;
    int windows = atoi(argv[3]), length = atoi(argv[4]), n_greedy = atoi(argv[5]), n_ids;
    size_t n_text;
    char *text = slurp(argv[2], &n_text);
    llama_log_set(only_errors, NULL);
    llama_backend_init();
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    struct llama_model *model = llama_model_load_from_file(argv[1], mp);
    if (!text || !model)
        return 1;
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t)(length < 256 ? 256 : length);
    cp.n_batch = cp.n_ubatch = cp.n_ctx;
    cp.n_threads = cp.n_threads_batch = 2;
    cp.type_k = cp.type_v = GGML_TYPE_F32;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context *ctx = llama_init_from_model(model, cp);
    llama_token *ids = tokenize(vocab, text, n_text, &n_ids), after[N_PROMPT + MAX_GREEDY];
    int n_vocab = llama_vocab_n_tokens(vocab);
    double sum = 0, greedy_sum = 0;
    if (!ctx || n_ids < windows * length || n_ids < N_PROMPT || n_greedy > MAX_GREEDY)
        return 1;
    for (int w = 0; w < windows; w++)
        if (score(ctx, n_vocab, ids + w * length, length, &sum) != 0)
            return 1;
    memcpy(after, ids, N_PROMPT * sizeof *ids);
    if (greedy(ctx, n_vocab, after, n_greedy) != 0 ||
        score(ctx, n_vocab, after, N_PROMPT + n_greedy, &greedy_sum) != 0)
        return 1;
    print_result(n_ids, sum / (windows * (length - 1.0)), greedy_sum / (N_PROMPT + n_greedy - 1), after,
                 N_PROMPT + n_greedy);
    free(text);
    free(ids);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
