/* See owner_bytes.h. */
#include "proto/share/owner_bytes.h"

#include "proto/base/decision.h"
#include "proto/share/audit.h"
#include "proto/share/board.h"
#include "proto/share/history.h"
#include "proto/share/segment.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/settings.h"
#include "proto/spec/spec.h"

/* Of the ledger's parts: daemon/model/memory.c checks the sum against the ledger itself. */
#define PART_ALIGN    UINT64_C(128)
#define HEAD_BYTES    UINT64_C(1024)
#define UNIT_BYTES    UINT64_C(64)
#define CELL_BYTES    UINT64_C(8)
#define METRICS_BYTES UINT64_C(64)
#define BLOBS_BYTES   (UINT64_C(2) * 768 * 1024)
#define MORE_BYTES    (2 * (16 + DECISION_GROUPS_MAX * DECISION_RATES * UINT64_C(8)))
#define WINDOW_UNITS  3u
#define GUARD_BYTES   UINT64_C(256)
#define REWIND_BYTES  UINT64_C(128)
#define BACK_BYTES    UINT64_C(520)
#define SET_BYTES     (layout_align(2 * sizeof(struct settings_kept), 64) + 64)
#define CHOSEN_BYTES  (2 * (16 + DECISION_GROUPS_MAX * UINT64_C(8)))

/* Those of an average, and of matrices, are of the same units' slices. */
static uint64_t chunk_count(const struct shardmap *map)
{
    uint64_t chunks = 0;
    for (uint32_t u = 0; u < map->units; u++) {
        const uint64_t of_slice = (map->slice[u].elems + KERN_CHUNK_ELEMS - 1) / KERN_CHUNK_ELEMS;
        chunks += map->trails * of_slice;
    }
    return chunks;
}

uint64_t owner_ledger_bytes(const struct shardmap *map, const struct owner_ask *ask)
{
    const uint64_t parts[] = { HEAD_BYTES,
                               map->units * UNIT_BYTES,
                               (uint64_t)map->units * ask->returns * CELL_BYTES,
                               ask->returns * METRICS_BYTES,
                               KERN_TRAIL_BYTES,
                               chunk_count(map) * sizeof(uint64_t),
                               ask->spec_bytes,
                               BLOBS_BYTES,
                               HISTORY_BYTES,
                               MORE_BYTES,
                               GUARD_BYTES,
                               REWIND_BYTES,
                               AUDIT_BYTES,
                               BACK_BYTES,
                               SET_BYTES,
                               CHOSEN_BYTES };
    uint64_t at = 0;
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++)
        at = layout_align(at + parts[i], PART_ALIGN);
    return layout_align(at, SHD_PAGE_BYTES);
}

uint64_t owner_window_bytes(const struct shardmap *map)
{
    const uint64_t state = shardmap_state_bytes(map);
    uint64_t most = 0;
    for (uint32_t u = 0; u < map->units; u++) {
        uint64_t bytes = map->slice[u].elems * sizeof(float); /* the sum */
        for (uint32_t a = 0; a < map->arrays; a++)
            bytes += shardmap_array_bytes(map, a, u);
        most = bytes > most ? bytes : most;
    }
    const uint64_t window = WINDOW_UNITS * most;
    return window < state ? window : state;
}

struct owner_bytes owner_bytes(const struct shardmap *map, const struct owner_ask *ask)
{
    struct owner_bytes b = {
        .state = shardmap_state_bytes(map),
        .ledger = owner_ledger_bytes(map, ask),
        .publish = shardmap_publish_bytes(map),
        .board = layout_align(board_bytes(map->units), SHD_PAGE_BYTES),
        .spec = ask->spec_bytes > SPEC_MESSAGE_BYTES_MAX
                    ? layout_align(ask->spec_bytes, SHD_PAGE_BYTES)
                    : 0,
        .inbox = ask->slots > 0 ? ask->sessions * shardmap_inbox_bytes(map, ask->slots) : 0,
        .spill_max = ask->returns * map->train_elems * sizeof(float),
    };
    const uint64_t published = ask->publish_on_file ? 0 : b.publish;
    b.spare = ask->keeper ? published + b.board + b.inbox : 0;
    b.window = ask->on_file ? owner_window_bytes(map) + map->scratch_elems * sizeof(float) : 0;
    b.file = ask->on_file ? b.state : 0;
    b.publish_file = ask->publish_on_file ? b.publish * (ask->keeper ? 2 : 1) : 0;
    b.all = b.state - b.file + b.window + b.ledger + published + b.board + b.spec + b.inbox +
            b.spare;
    return b;
}

struct owner_gpu_bytes owner_gpu_bytes(const struct shardmap *map, const struct owner_ask *ask)
{
    const uint64_t trail = layout_align(GPU_TRAIL_BYTES + chunk_count(map) * GPU_TRAIL_CHUNK_BYTES,
                                        PART_ALIGN);
    const uint64_t state = layout_align(shardmap_state_bytes(map) + trail, SHD_PAGE_BYTES);
    const uint64_t inbox = ask->slots > 0 ? shardmap_inbox_bytes(map, ask->slots) : 0;
    struct owner_gpu_bytes b = {
        .state = layout_align(state, GPU_GRANULE_BYTES),
        .publish = layout_align(shardmap_publish_bytes(map), GPU_GRANULE_BYTES),
        .inbox = ask->sessions * layout_align(inbox, GPU_GRANULE_BYTES),
        .staging = GPU_STAGING_BYTES,
    };
    b.spare = ask->keeper ? b.publish : 0;
    b.all = b.state + b.publish + b.inbox + b.spare + b.staging;
    return b;
}
