// Fetching what `index_scores` lists; for fetch_listed.cu. What passes between the two is in
// prefetch.cuh.
//
//   lists --scanners--> sketch of each row's scores --judges--> bars
//                   \-> queue in shared memory --posters: budget, claim, victim--> mailboxes
//   mailboxes --movers: host to device-->
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
#ifndef QUEUE_ENTRIES
#define QUEUE_ENTRIES 4096
#endif
constexpr u32 LISTED_WARPS = LISTED_THREADS / WARP;
constexpr u32 MAILS_EACH = MAILS;  // mailboxes of a moving warp
constexpr u32 MOST_MOVING = 4;     // blocks of a cluster
constexpr u32 MOST_LISTS = 4;       // of a thread that scans
constexpr u32 ENTRIES_AT_ONCE = 4;  // of a list
constexpr i32 UNSETTLED = -2;      // a device slot that isn't known yet
constexpr u32 WATCHED_A_LANE = MOST_ROWS / WARP;

struct Mail {
  i32 host_slot;    // NONE: the box is empty
  i32 device_slot;  // where it goes; NONE: nowhere
};

// Candidates in the order in which they come; what comes after the last place is forgotten.
struct Queue {
  u32 tail, head;
  u32 pad[2];
  Listed entries[QUEUE_ENTRIES];  // `epoch` is 1 once the rest is there
};

struct FetchShared {
  u32 idle[MOST_MOVING * MAILS_EACH];  // in the finding block: one bit a box, by block and number
  u32 scanning, posting;               // in the finding block: warps that still are
  u32 closed;                          // in moving blocks: no mail will come
  u32 pad;
  Mail mail[MAILS_EACH][LISTED_WARPS];
  u32 lows[MOST_ROWS];    // keys of the scores from which on candidates are listed
  float bars[MOST_ROWS];  // as the watcher saw them last; +inf: the row's selection is known
  Queue likely, unlikely;
};

struct ListedArguments {
  PrefetchArguments prefetch;
  Contexts contexts;
  const Listed* lists;  // [blocks, lists, LIST]
  const u32* epoch;     // [1]
  const i32* kth;       // [rows], bits of the true k-th scores; UNKNOWN until they are known
  const i32* scored;    // [rows], pages whose candidates are listed
  u32* sketch;          // [rows, SKETCH_BINS], candidates by score
  i32* bars;            // [rows], bits of the scores that are worth fetching; predictions at first
  u32 num_lists;        // of all scoring blocks
  u32 k;
  float margin;         // see lowered()
  u32 pad;
};

// Who finds and who moves in a cluster: its first block and the others, or parts of the only one.
struct Roles {
  u32 scanning, judging, posting, finding;  // warps, in this order; one more of them watches
  u32 moving;  // warps of a block that moves
  u32 words;   // of `idle` in use
  bool alone;  // a cluster of one block
};

DEVICE Roles roles_of_cluster() {
  const u32 blocks = cluster_size();
  Roles roles = {};
  roles.alone = blocks == 1;
  roles.finding = roles.alone ? FINDING_WARPS : LISTED_WARPS;
  roles.scanning = roles.finding / 2;
  roles.judging = roles.finding < 16 ? 1 : roles.finding / 8;
  roles.posting = roles.finding - roles.scanning - roles.judging - 1;
  roles.moving = roles.alone ? LISTED_WARPS - FINDING_WARPS : LISTED_WARPS;
  roles.words = roles.alone ? MAILS_EACH : (blocks - 1) * MAILS_EACH;
  return roles;
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

// Whether a candidate is worth fetching, as far as is known by now.
DEVICE bool is_likely(FetchShared* shared, u32 row, float score) {
  return score >= bits_float(u32(load_from_cluster(reinterpret_cast<i32*>(&shared->bars[row]))));
}

DEVICE void push(Queue* queue, bool wants, const Candidate& candidate, u32 lane) {
  const u32 wanting = __ballot_sync(ALL_LANES, wants);
  if (wanting == 0) return;
  u32 first = 0;
  if (lane == 0) first = atomicAdd(&queue->tail, u32(__popc(wanting)));
  first = __shfl_sync(ALL_LANES, first, 0);
  const u32 at = first + __popc(wanting & ((1u << lane) - 1));
  if (!wants || at >= QUEUE_ENTRIES) return;
  Listed* entry = &queue->entries[at];
  entry->host_slot = candidate.host_slot;
  entry->score = candidate.score;
  entry->row = candidate.row;
  store_to_block(&entry->epoch, 1);
}

// The next few candidates, one a lane; `none` where there are none.
DEVICE Candidate pop(Queue* queue, bool* none, u32 lane) {
  u32 first = 0, count = 0;
  if (lane == 0) {
    for (u32 head = load_from_block(&queue->head);;) {
      const u32 tail = smaller(load_from_block(&queue->tail), QUEUE_ENTRIES);
      first = head;
      count = smaller(tail - head, WARP);
      if (count == 0) break;
      const u32 now = u32(atomicCAS(reinterpret_cast<i32*>(&queue->head), i32(head),
                                    i32(head + count)));
      if (now == head) break;
      head = now;
    }
  }
  first = __shfl_sync(ALL_LANES, first, 0);
  count = __shfl_sync(ALL_LANES, count, 0);
  *none = count == 0;
  Candidate candidate = {lane < count, NONE, 0, 0};
  if (lane < count) {
    const Listed* entry = &queue->entries[first + lane];
    while (load_from_block(&entry->epoch) == 0) {
    }
    candidate = {true, entry->host_slot, entry->score, entry->row};
  }
  return candidate;
}

// Fetch the lanes' candidates, as movers become idle, as far as budgets go and while they are likely.
DEVICE void post(const ListedArguments& a, FetchShared* shared, const Roles& roles,
                 const Candidate& candidate, i32 floor, Fetched* fetched, u32 lane) {
  const PrefetchArguments& to = a.prefetch;
  const Layer& layer = to.layer;
  const bool waits = candidate.valid && is_likely(shared, candidate.row, candidate.score);
  for (u32 left = __ballot_sync(ALL_LANES, waits); left != 0;) {
    const Box box = take_boxes(shared, roles, left, lane);
    const u32 asking = __ballot_sync(ALL_LANES, box.taken);
    left &= ~asking;
    if (asking != 0) {
      const u32 place = ask_budget(to, a.contexts, candidate.row, box.taken, lane);
      const bool granted = place < to.most;
      const u32 at = candidate.row * to.most + place;
      if (granted) to.scores[at] = candidate.score;
      for (u32 refused = __ballot_sync(ALL_LANES, box.taken && !granted); refused != 0;) {
        const u32 row = __shfl_sync(ALL_LANES, candidate.row, __ffs(refused) - 1);
        const u32 same = __ballot_sync(ALL_LANES, candidate.row == row);
        left &= ~same;  // it has no budget left
        refused &= ~same;
      }
      const bool mine = granted && claim(layer, candidate.host_slot);
      Mail* mail = mail_of(shared, roles, box);
      if (mine) store_to_cluster(&mail->host_slot, candidate.host_slot);
      if (box.taken && !mine) or_in_cluster(&shared->idle[box.word], 1u << box.bit);
      const u32 claims = __ballot_sync(ALL_LANES, mine);
      u32 first = 0;
      if (lane == 0 && claims != 0) first = take_names(layer, __popc(claims));
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
    } else {
      pause_briefly();
    }
    const bool still = left >> lane & 1;
    left &= __ballot_sync(ALL_LANES, still && is_likely(shared, candidate.row, candidate.score));
  }
}

// One more candidate of a row.
DEVICE void note_score(const ListedArguments& a, FetchShared* shared, u32 row, float score) {
  const u32 bin = (order_key(float_bits(score)) - shared->lows[row]) >> SKETCH_SHIFT;
  atomicAdd(a.sketch + row * SKETCH_BINS + smaller(bin, SKETCH_BINS - 1), 1u);
}

// The lists of a thread that scans, and how far it has read them.
struct Reading {
  const Listed* lists[MOST_LISTS];
  u64 places;  // sixteen bits each
  u32 over;    // one bit each
};

DEVICE Reading begin_reading(const ListedArguments& a, u32 first, u32 step, u32 lists) {
  Reading reading = {{}, 0, 0};
#pragma unroll
  for (u32 i = 0; i < MOST_LISTS; i++) {
    const u32 number = first + i * step;
    reading.lists[i] = a.lists + u64(number) * LIST;
    if (i >= lists || number >= a.num_lists) reading.over |= 1u << i;
  }
  return reading;
}

// The next few entries of one of them that are there: candidates, in order.
DEVICE void read_entries(Reading* reading, u32 which, u32 epoch, Candidate* candidates) {
  Words entries[ENTRIES_AT_ONCE];
  const Listed* list = reading->lists[0];
#pragma unroll
  for (u32 i = 1; i < MOST_LISTS; i++)
    if (which == i) list = reading->lists[i];
  u32 place = u32(reading->places >> 16 * which) & 0xffffu;
  const u32 first = place;
  bool over = reading->over >> which & 1;
#pragma unroll
  for (u32 i = 0; i < ENTRIES_AT_ONCE; i++) {
    entries[i] = {0, 0, 0, epoch + 1};
    if (!over && place + i < LIST) entries[i] = load_whole(list + place + i);
  }
  bool next = !over;  // entries may be seen in another order than they came in
#pragma unroll
  for (u32 i = 0; i < ENTRIES_AT_ONCE; i++) {
    const bool seen = next && entries[i].w == epoch;
    const bool found = seen && i32(entries[i].x) != END;
    over = over || seen != found;
    next = found;
    place += found;
    candidates[i] = {found, i32(entries[i].x), bits_float(entries[i].y), found ? entries[i].z : 0};
  }
  over = over || place >= LIST;
  reading->places += u64(place - first) << 16 * which;
  reading->over |= u32(over) << which;
}

// A thread that scans: it reads some lists in turn, a few entries at once.
DEVICE void scan(const ListedArguments& a, FetchShared* shared, u32 first, u32 step, u32 lane) {
  const u32 epoch = *a.epoch, lists = smaller(ceil_div(a.num_lists, step), MOST_LISTS);
  Reading reading = begin_reading(a, first, step, lists);
  u64 since = nanoseconds();
  for (u32 which = 0;; which = which + 1 == lists ? 0 : which + 1) {
    Candidate candidates[ENTRIES_AT_ONCE];
    read_entries(&reading, which, epoch, candidates);
    if (__any_sync(ALL_LANES, candidates[0].valid)) {
      i32 where[ENTRIES_AT_ONCE];
#pragma unroll
      for (u32 i = 0; i < ENTRIES_AT_ONCE; i++) {
        where[i] = 0;
        if (candidates[i].valid)
          where[i] =
              load_shared_value(a.prefetch.layer.host_to_device + candidates[i].host_slot);
      }
#pragma unroll
      for (u32 i = 0; i < ENTRIES_AT_ONCE; i++) {
        const Candidate& one = candidates[i];
        if (one.valid) note_score(a, shared, one.row, one.score);
        const bool absent = one.valid && where[i] < 0;
        const bool likely = absent && is_likely(shared, one.row, one.score);
        push(&shared->likely, likely, one, lane);
        push(&shared->unlikely, absent && !likely, one, lane);
      }
      since = nanoseconds();
      continue;
    }
    const bool over = reading.over == (1u << MOST_LISTS) - 1;
    if (__all_sync(ALL_LANES, over || nanoseconds() - since > PATIENCE)) break;
    pause_briefly();
  }
  warp_sync();
  if (lane == 0) subtract_in_cluster(&shared->scanning, 1);
}

// The score that a row's k-th will have if the rest of the row is like what is scored of it.
DEVICE void judge_row(const ListedArguments& a, FetchShared* shared, u32 row, u32 lane) {
  constexpr u32 EACH = SKETCH_BINS / WARP;
  const u32 pages = ceil_div(tokens_of(a.contexts, row), PAGE_TOKENS);
  const u32 scored =
      __shfl_sync(ALL_LANES, lane == 0 ? u32(load_shared_value(a.scored + row)) : 0u, 0);
  const u32 wanted = pages == 0 ? 0 : u32(u64(a.k) * scored / pages);
  if (wanted < LEAST_JUDGED && scored < pages) return;
  const u32 first = (WARP - 1 - lane) * EACH;  // the highest to lane 0
  u32 bins[EACH], sum = 0, total;
#pragma unroll
  for (u32 i = 0; i < EACH; i += 4) {
    const Words four = load_others_words(a.sketch + row * SKETCH_BINS + first + i);
    bins[i] = four.x, bins[i + 1] = four.y, bins[i + 2] = four.z, bins[i + 3] = four.w;
    sum += four.x + four.y + four.z + four.w;
  }
  u32 above = lanes_before(sum, lane, &total);
  u32 offset = 0;
  bool here = false;
#pragma unroll
  for (u32 i = EACH; i-- > 0;) {
    if (above < wanted && wanted <= above + bins[i]) {
      here = true;
      const float within = float(above + bins[i] - wanted) / float(bins[i]);
      offset = ((first + i) << SKETCH_SHIFT) + u32(within * float(1u << SKETCH_SHIFT));
    }
    above += bins[i];
  }
  const u32 holder = __ballot_sync(ALL_LANES, here);
  offset = holder == 0 ? 0 : __shfl_sync(ALL_LANES, offset, __ffs(holder) - 1);
  if (lane == 0)
    store_shared_value(a.bars + row, i32(order_bits(shared->lows[row] + offset)));
}

DEVICE bool any_posts(FetchShared* shared, u32 lane) {
  return __shfl_sync(ALL_LANES, lane == 0 ? load_from_block(&shared->posting) : 0, 0) != 0;
}

DEVICE void judge(const ListedArguments& a, FetchShared* shared, u32 first, u32 step, u32 lane) {
  const u32 rows = smaller(a.contexts.rows, MOST_ROWS);
  while (any_posts(shared, lane)) {
    for (u32 row = first; row < rows; row += step) judge_row(a, shared, row, lane);
    pause_briefly();
  }
}

// Keep the block's bars up to date.
DEVICE void watch(const ListedArguments& a, FetchShared* shared, u32 lane) {
  const u32 rows = smaller(a.contexts.rows, MOST_ROWS);
  while (any_posts(shared, lane)) {
#pragma unroll
    for (u32 i = 0; i < WATCHED_A_LANE; i++) {
      const u32 row = i * WARP + lane;
      if (row >= rows) continue;
      const i32 bar = load_shared_value(a.bars + row);
      const bool open = u32(load_shared_value(a.kth + row)) == UNKNOWN;
      store_to_cluster(reinterpret_cast<i32*>(&shared->bars[row]), open ? bar : i32(0x7f800000));
    }
    pause_briefly();
  }
}

DEVICE void post_all(const ListedArguments& a, FetchShared* shared, const Roles& roles, u32 lane) {
  const i32 floor = *a.prefetch.layer.floor;
  Fetched fetched = {0, 0};
  for (;;) {
    const bool last =
        __shfl_sync(ALL_LANES, lane == 0 ? load_from_block(&shared->scanning) : 0, 0) == 0;
    bool none;
    Candidate candidate = pop(&shared->likely, &none, lane);
    if (none && !last) {
      pause_briefly();
      continue;
    }
    if (none) candidate = pop(&shared->unlikely, &none, lane);
    if (none) break;
    post(a, shared, roles, candidate, floor, &fetched, lane);
  }
  add_fetched(a.prefetch, fetched, lane);
  warp_sync();
  if (lane != 0 || subtract_in_cluster(&shared->posting, 1) != 1) return;
  for (u32 block = 0; block <= (roles.words - 1) / MAILS_EACH; block++) {
    u32* closed = roles.alone ? &shared->closed : peer(&shared->closed, 1 + block);
    store_to_cluster(reinterpret_cast<i32*>(closed), 1);
  }
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

DEVICE void begin_finding(const ListedArguments& a, FetchShared* shared, u32 thread) {
  if (thread == 0)
    shared->likely.tail = shared->likely.head = shared->unlikely.tail = shared->unlikely.head = 0;
  for (u32 at = thread; at < QUEUE_ENTRIES; at += LISTED_THREADS)
    shared->likely.entries[at].epoch = shared->unlikely.entries[at].epoch = 0;
  for (u32 row = thread; row < smaller(a.contexts.rows, MOST_ROWS); row += LISTED_THREADS) {
    const float threshold = threshold_of(a.prefetch.request_slots, a.prefetch.thresholds, row);
    shared->lows[row] = order_key(float_bits(lowered(threshold, a.margin)));
    shared->bars[row] = threshold;
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
    shared->scanning = roles.scanning;
    shared->posting = roles.posting;
    shared->closed = 0;
  }
  if (block == 0) begin_finding(a, shared, thread);
  cluster_arrive();
  cluster_wait();
  block_sync();
  const u32 judges = roles.scanning + roles.judging, posters = judges + roles.posting;
  if (block == 0 && warp < roles.scanning)
    scan(a, shared, thread * clusters + cluster, roles.scanning * WARP * clusters, lane);
  else if (block == 0 && warp < judges)
    judge(a, shared, cluster * roles.judging + warp - roles.scanning, clusters * roles.judging, lane);
  else if (block == 0 && warp < posters)
    post_all(a, shared, roles, lane);
  else if (block == 0 && warp < roles.finding)
    watch(a, shared, lane);
  else
    move_mail(a, shared, roles, block, roles.alone ? warp - roles.finding : warp, lane);
  warp_sync();
  cluster_arrive();  // nobody's shared memory is written to after it has gone
  cluster_wait();
}
