#include "qc_map.h"

#include "qc_alloc.h"

#include <pthread.h>
#include <string.h>
#include <sys/random.h>

typedef struct slot {
    const char *key; /* NULL = free */
    uint32_t key_bytes;
    uint32_t hash;
    int64_t value;
} slot;

struct qc_map {
    slot *slots;
    size_t n_slots; /* power of two, at most half full */
    size_t n_keys;
};

/* Keys come from files: a seed of this process keeps a crafted file from making all its keys collide. Nothing
 * but the order inside the table depends on it. */
static uint64_t hash_seed;
static pthread_once_t hash_seeded = PTHREAD_ONCE_INIT;

static void seed_hash(void)
{
    if (getrandom(&hash_seed, sizeof hash_seed, GRND_NONBLOCK) != (ssize_t)sizeof hash_seed)
        hash_seed = 0x9E3779B97F4A7C15u;
}

static uint32_t hash_bytes(const char *s, size_t n_bytes)
{
    uint64_t h = hash_seed ^ n_bytes; /* multiply-xorshift over 8-byte words */
    while (n_bytes >= 8) {
        uint64_t w;
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
        s += 8;
        n_bytes -= 8;
    }
    uint64_t w = 0;
    memcpy(&w, s, n_bytes);
    h = (h ^ w) * 0xD6E8FEB86659FD93u;
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93u;
    return (uint32_t)(h >> 32);
}

static slot *find(const qc_map *map, const char *key, size_t key_bytes, uint32_t hash)
{
    size_t i = hash & (map->n_slots - 1);
    for (;; i = (i + 1) & (map->n_slots - 1)) {
        slot *s = &map->slots[i];
        if (!s->key)
            return s;
        if (s->hash == hash && s->key_bytes == key_bytes && memcmp(s->key, key, key_bytes) == 0)
            return s;
    }
}

qc_map *qc_map_new(size_t n_expected)
{
    size_t n_slots = 16;
    pthread_once(&hash_seeded, seed_hash);
    if (n_expected > SIZE_MAX / 4)
        return NULL;
    while (n_slots / 2 < n_expected)
        n_slots *= 2;
    qc_map *map = qc_calloc(1, sizeof *map);
    if (!map)
        return NULL;
    map->slots = qc_calloc(n_slots, sizeof *map->slots);
    map->n_slots = n_slots;
    if (!map->slots) {
        qc_free(map);
        return NULL;
    }
    return map;
}

void qc_map_free(qc_map *map)
{
    if (!map)
        return;
    qc_free(map->slots);
    qc_free(map);
}

static int grow(qc_map *map)
{
    slot *old = map->slots;
    size_t n_old = map->n_slots;
    slot *fresh = qc_calloc(n_old * 2, sizeof *fresh);
    if (!fresh)
        return QC_E_RESOURCE;
    map->slots = fresh;
    map->n_slots = n_old * 2;
    for (size_t i = 0; i < n_old; i++)
        if (old[i].key)
            *find(map, old[i].key, old[i].key_bytes, old[i].hash) = old[i];
    qc_free(old);
    return QC_OK;
}

int qc_map_add(qc_map *map, const char *key, size_t key_bytes, int64_t value)
{
    if (key_bytes > UINT32_MAX)
        return QC_E_RESOURCE;
    uint32_t hash = hash_bytes(key, key_bytes);
    slot *s = find(map, key, key_bytes, hash);
    if (s->key)
        return 0;
    if (map->n_keys + 1 > map->n_slots / 2) {
        QC_TRY(grow(map));
        s = find(map, key, key_bytes, hash);
    }
    *s = (slot){.key = key, .key_bytes = (uint32_t)key_bytes, .hash = hash, .value = value};
    map->n_keys++;
    return 1;
}

int64_t qc_map_get(const qc_map *map, const char *key, size_t key_bytes, int64_t absent)
{
    if (key_bytes > UINT32_MAX)
        return absent;
    const slot *s = find(map, key, key_bytes, hash_bytes(key, key_bytes));
    return s->key ? s->value : absent;
}

size_t qc_map_count(const qc_map *map)
{
    return map->n_keys;
}
