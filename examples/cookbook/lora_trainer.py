"""Hugging Face's Trainer with LoRA: the adapters travel, and PEFT loads the folder at the end.

python lora_trainer.py

The frozen model is made here, and small; one's own comes from a folder that every site has.
"""

import multiprocessing

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import xain

SITES = ("north", "east")

# --- data, model and training, as without federation ---

LENGTH, WORDS = 6, 20


def load(part):
    """Texts as numbers of words. A text is of class 1 if its first word is of the first half."""
    words = np.random.default_rng(part).integers(0, WORDS, (160, LENGTH))
    classes = (words[:, 0] < WORDS // 2).astype(int)
    rows = zip(torch.tensor(words), torch.tensor(classes), strict=True)
    return [{"input_ids": ids, "labels": label} for ids, label in rows]


def make_frozen():
    torch.manual_seed(0)  # the same model at every site
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def make_model():
    adapters = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=32, target_modules=["query", "value", "dense"]
    )
    return get_peft_model(make_frozen(), adapters)


def make_trainer(model, rows, epochs, folder):
    options = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        learning_rate=0.01,
        per_device_train_batch_size=16,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, options, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer


def loss_and_accuracy(model, rows):
    inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    model.eval()
    with torch.no_grad():
        output = model(**inputs)
    right = output.logits.argmax(1) == inputs["labels"]
    return output.loss.item(), right.float().mean().item()


# --- at a site ---


def site(number, coordinator):
    torch.set_num_threads(1)  # all sites are on this machine
    rows, model = load(number), make_model()
    for round in xain.rounds(model, id=SITES[number], coordinator=coordinator):
        model.load_state_dict(round.weights)
        trainer = make_trainer(model, rows, round.config.epochs, SITES[number])
        round.submit(model, samples=len(rows), metrics={"loss": trainer.train().training_loss})


# --- at the server ---


def main():
    model, test = make_model(), load(len(SITES))
    before, _ = loss_and_accuracy(model, test)
    with xain.session(
        model,
        rounds=4,
        epochs=2,
        min_participants=len(SITES),
        address="127.0.0.1:0",
    ) as session:
        # Processes: trainers in threads of one process share the state of accelerate.
        processes = multiprocessing.get_context("spawn")
        for number in range(len(SITES)):
            processes.Process(target=site, args=(number, session.address), daemon=True).start()
        for round in session:
            record = round.run()
            model.load_state_dict(record.weights)
            _, accuracy = loss_and_accuracy(model, test)
            record.evaluate(accuracy=accuracy, samples=len(test))
    model.save_pretrained("adapter")
    loaded = PeftModel.from_pretrained(make_frozen(), "adapter")
    loss, accuracy = loss_and_accuracy(loaded, test)
    print(f"loss {before:.3f} before training, {loss:.3f} of the adapter that PEFT has loaded")
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
