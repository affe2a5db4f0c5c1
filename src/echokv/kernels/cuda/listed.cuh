// Fetching what `index_scores` lists; for fetch_listed.cu. What passes between the two is in
// prefetch.cuh.
#pragma once
#include "prefetch.cuh"

#ifndef LISTED_THREADS
#define LISTED_THREADS 1024
#endif
#ifndef FINDING_WARPS  // of a block that is a cluster of its own
#define FINDING_WARPS (LISTED_THREADS / WARP / 2)
#endif
#ifndef MAILS
#define MAILS 1
#endif
constexpr u32 LISTED_WARPS = LISTED_THREADS / WARP;
constexpr u32 MAILS_EACH = MAILS;  // mailboxes of a moving warp
constexpr u32 MOST_MOVING = 4;     // blocks of a cluster
constexpr i32 UNSETTLED = -2;      // a device slot that isn't known yet

struct Mail {
  i32 host_slot;    // NONE: the box is empty
  i32 device_slot;  // where it goes; NONE: nowhere
};

struct FetchShared {
  u32 idle[MOST_MOVING * MAILS_EACH];  // in the finding block: one bit a box, by block and number
  u32 finding;                         // in the finding block: warps that still are
  u32 closed;                          // in moving blocks: no mail will come
  Mail mail[MAILS_EACH][LISTED_WARPS];
};

struct ListedArguments {
  PrefetchArguments prefetch;
  Contexts contexts;
  const Listed* lists;  // [blocks, lists, LIST]
  const u32* epoch;     // [1]
  const i32* kth;       // [rows], bits of the true k-th scores; UNKNOWN until they are known
  u32 num_lists;        // of all scoring blocks
  u32 readers;          // threads that read a list
};

// Who finds and who moves in a cluster: its first block and the others, or parts of the only one.
struct Roles {
  u32 finding;  // warps
  u32 moving;   // warps of a block that moves
  u32 words;    // of `idle` in use
  bool alone;   // a cluster of one block
};

DEVICE Roles roles_of_cluster() {
  const u32 blocks = cluster_size();
  if (blocks == 1) return {FINDING_WARPS, LISTED_WARPS - FINDING_WARPS, MAILS_EACH, true};
  return {LISTED_WARPS, LISTED_WARPS, (blocks - 1) * MAILS_EACH, false};
}

// Whether a row's selection isn't known yet.
DEVICE bool is_open(const ListedArguments& a, u32 row) {
  return u32(load_shared_value(a.kth + row)) == UNKNOWN;
}

// A box that this lane may post to.
struct Box {
  u32 word, bit;
  bool taken;
};

// Boxes for the first of the wanting lanes, as many as are idle.
DEVICE Box take_boxes(FetchShared* shared, const Roles& roles, u32 wanting, u32 lane) {
  const u32 wanted = __popc(wanting);
  u32 mine = lane < roles.words ? swap_in_cluster(&shared->idle[lane], 0) : 0;
  u32 total;
  const u32 before = lanes_before(__popc(mine), lane, &total);
  u32 surplus = mine;
  for (u32 i = before; i < wanted && surplus != 0; i++) surplus &= surplus - 1;
  if (surplus != 0) or_in_cluster(&shared->idle[lane], surplus);
  mine &= ~surplus;
  u32 place = __popc(wanting & ((1u << lane) - 1));  // among the boxes
  Box box = {0, 0, false};
  const bool wants = wanting >> lane & 1;
  for (u32 word = 0; word < roles.words; word++) {
    u32 bits = __shfl_sync(ALL_LANES, mine, word);
    const u32 count = __popc(bits);
    if (wants && !box.taken && place < count) {
      for (u32 i = 0; i < place; i++) bits &= bits - 1;
      box = {word, u32(__ffs(bits)) - 1, true};
    }
    place -= smaller(place, count);
  }
  return box;
}

DEVICE Mail* mail_of(FetchShared* shared, const Roles& roles, const Box& box) {
  Mail* mine = &shared->mail[box.word % MAILS_EACH][box.bit];
  return roles.alone ? mine : peer(mine, 1 + box.word / MAILS_EACH);
}

// Fetch those of the lanes' candidates that are absent, as movers become idle, as far as budgets go
// and until the rows' selections are known.
DEVICE void post_found(const ListedArguments& a, FetchShared* shared, const Roles& roles,
                       const Candidate& candidate, i32 floor, Fetched* fetched, u32 lane) {
  const PrefetchArguments& to = a.prefetch;
  const Layer& layer = to.layer;
  bool waits = false;
  if (candidate.valid) {
    const i32 where = load_shared_value(layer.host_to_device + candidate.host_slot);
    waits = is_open(a, candidate.row) && where < 0;
  }
  for (u32 left = __ballot_sync(ALL_LANES, waits); left != 0;) {
    const Box box = take_boxes(shared, roles, left, lane);
    const u32 asking = __ballot_sync(ALL_LANES, box.taken);
    left &= ~asking;
    if (asking == 0) {
      pause_briefly();
      left &= __ballot_sync(ALL_LANES, (left >> lane & 1) && is_open(a, candidate.row));
      continue;
    }
    const u32 place = ask_budget(to, a.contexts, candidate.row, box.taken, lane);
    const bool granted = place < to.most;
    const u32 at = candidate.row * to.most + place;
    if (granted) to.scores[at] = candidate.score;
    for (u32 refused = __ballot_sync(ALL_LANES, box.taken && !granted); refused != 0;) {
      const u32 row = __shfl_sync(ALL_LANES, candidate.row, __ffs(refused) - 1);
      left &= ~__ballot_sync(ALL_LANES, candidate.row == row);  // it has no budget left
      refused &= ~__ballot_sync(ALL_LANES, candidate.row == row);
    }
    const bool mine = granted && claim(layer, candidate.host_slot);
    Mail* mail = mail_of(shared, roles, box);
    if (mine) store_to_cluster(&mail->host_slot, candidate.host_slot);
    if (box.taken && !mine) or_in_cluster(&shared->idle[box.word], 1u << box.bit);
    const u32 claims = __ballot_sync(ALL_LANES, mine);
    if (claims == 0) continue;
    u32 first = 0;
    if (lane == 0) first = take_names(layer, __popc(claims));
    first = __shfl_sync(ALL_LANES, first, 0);
    Victim victim = {0, NONE, NONE};
    bool settled = false;
    if (mine) {
      victim = name_victim(layer, first + __popc(claims & ((1u << lane) - 1)));
      settled = settle(layer, &victim, candidate.host_slot, floor, floor);
      store_to_cluster(&mail->device_slot, victim.slot);
      if (settled) to.host_slots[at] = candidate.host_slot;
    }
    fetched->evicted += __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
    fetched->rows += __popc(__ballot_sync(ALL_LANES, settled));
    left &= __ballot_sync(ALL_LANES, (left >> lane & 1) && is_open(a, candidate.row));
  }
}

// A thread that finds: each reads some entries of one list.
DEVICE void find_listed(const ListedArguments& a, FetchShared* shared, const Roles& roles,
                        u32 cluster, u32 clusters, u32 thread) {
  const u32 lane = thread % WARP, epoch = *a.epoch;
  // Neighbours read neighbouring entries of one list.
  const u32 number = thread / a.readers * clusters + cluster;
  const Listed* list = a.lists + u64(number) * LIST;
  const i32 floor = *a.prefetch.layer.floor;
  Fetched fetched = {0, 0};
  u32 place = thread % a.readers;
  bool over = number >= a.num_lists;
  for (u64 since = nanoseconds();;) {
    Words entry = {0, 0, 0, epoch + 1};
    if (!over) entry = load_whole(list + place);
    const bool seen = entry.w == epoch;
    const bool found = seen && i32(entry.x) != END;
    if (seen) place += a.readers;
    over = over || seen != found || place >= LIST;
    if (__any_sync(ALL_LANES, found)) {
      const Candidate candidate = {found, i32(entry.x), bits_float(entry.y), found ? entry.z : 0};
      post_found(a, shared, roles, candidate, floor, &fetched, lane);
      since = nanoseconds();
      continue;
    }
    if (__all_sync(ALL_LANES, over || nanoseconds() - since > PATIENCE)) break;
    pause();
  }
  add_fetched(a.prefetch, fetched, lane);
  warp_sync();
  if (lane != 0 || subtract_in_cluster(&shared->finding, 1) != 1) return;
  for (u32 block = 0; block <= (roles.words - 1) / MAILS_EACH; block++)
    store_to_cluster(roles.alone ? reinterpret_cast<i32*>(&shared->closed)
                                 : reinterpret_cast<i32*>(peer(&shared->closed, 1 + block)), 1);
}

DEVICE i32 read_mail(const i32* field, u32 lane) {
  return __shfl_sync(ALL_LANES, lane == 0 ? load_from_cluster(field) : 0, 0);
}

// A warp that moves: one row of each box at a time.
DEVICE void move_mail(const ListedArguments& a, FetchShared* shared, const Roles& roles,
                      u32 block, u32 warp, u32 lane) {
  const Layer& layer = a.prefetch.layer;
  const u32 row_bytes = layer.row_bytes;
  for (;;) {
    RowPart parts[MAILS_EACH];
    i32 host_slots[MAILS_EACH];
    bool any = false;
    const i32 closed = read_mail(reinterpret_cast<i32*>(&shared->closed), lane);
#pragma unroll
    for (u32 i = 0; i < MAILS_EACH; i++) {
      host_slots[i] = read_mail(&shared->mail[i][warp].host_slot, lane);
      if (host_slots[i] < 0) continue;
      any = true;
      parts[i] = load_part(host_row(layer, host_slots[i]), row_bytes, lane);
    }
    if (!any && closed) break;
#pragma unroll
    for (u32 i = 0; i < MAILS_EACH; i++) {
      if (host_slots[i] < 0) continue;
      Mail* mail = &shared->mail[i][warp];
      i32 slot;
      do {
        slot = read_mail(&mail->device_slot, lane);
      } while (slot == UNSETTLED);
      if (lane == 0) {  // the row is here, in registers: the next may come
        mail->host_slot = NONE;
        mail->device_slot = UNSETTLED;
        u32* idle = &shared->idle[(block == 0 ? 0 : block - 1) * MAILS_EACH + i];
        or_in_cluster(roles.alone ? idle : peer(idle, 0), 1u << warp);
      }
      if (slot < 0) continue;
      u8* to = device_row(layer, slot);
      const u8* from = host_row(layer, host_slots[i]);
      store_part(to, parts[i], row_bytes, lane);
      for (u32 at = PART_BYTES; at < row_bytes; at += PART_BYTES)
        store_part(to + at, load_part(from + at, row_bytes - at, lane), row_bytes - at, lane);
    }
  }
}

// A thread of a cluster's block.
DEVICE void fetch_list(const ListedArguments& a, u32 cluster, u32 clusters, u32 thread) {
  FetchShared* shared = reinterpret_cast<FetchShared*>(shared_memory());
  const Roles roles = roles_of_cluster();
  const u32 lane = thread % WARP, warp = thread / WARP, block = cluster_rank();
  if (thread < LISTED_WARPS)
    for (u32 i = 0; i < MAILS_EACH; i++) shared->mail[i][thread] = {NONE, UNSETTLED};
  if (thread < MOST_MOVING * MAILS_EACH)
    shared->idle[thread] = roles.moving == WARP ? ALL_LANES : (1u << roles.moving) - 1;
  if (thread == 0) {
    shared->finding = roles.finding;
    shared->closed = 0;
  }
  cluster_arrive();
  cluster_wait();
  block_sync();
  if (block == 0 && warp < roles.finding)
    find_listed(a, shared, roles, cluster, clusters, thread);
  else
    move_mail(a, shared, roles, block, roles.alone ? warp - roles.finding : warp, lane);
  warp_sync();
  cluster_arrive();  // nobody's shared memory is written to after it has gone
  cluster_wait();
}
